"""What ranks print, on its way to the processes that show it."""

STDOUT, STDERR = 1, 2
Line = tuple[int, int, str]  # that a rank has printed: rank, stream, text without its newline
