"""`baton bench`: ask as many do, and measure what a client sees.

command  the options      plan     what is sent, and when        servers, http  to whom
run      the two loops    sample   what was seen of one request  report         the numbers of all of them
compare  two reports      plot     pictures                      progress       what a terminal shows meanwhile
"""
