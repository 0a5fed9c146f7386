"""What the commands do, on top of all other packages.

`dgt_command` beside this package parses them.
"""
