"""The implementation of the commands, on top of all other packages.

`dgt_command` beside this package parses them.
"""
