"""What every package needs and no paper describes: whole files, the process group, seeds, errors
and the log.
"""
