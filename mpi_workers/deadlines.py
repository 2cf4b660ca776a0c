"""Time limits that depend on each other, in seconds: a wait lasts longer than the waits inside it.

In each chain the limits grow; a test compares them. A limit that no other depends on is declared
where it is used.
"""

from __future__ import annotations

# The end of a gang, from its ranks to the process that asks for it.
EXIT_GRACE_S = 4.0  # in the proxy: for libraries to close and ranks to exit
NODES_END_S = 5.0  # in the GroupManager: for the proxies to end
KILL_TIMEOUT_S = 8.0  # in a session: for the GroupManager to kill a gang
GANG_END_S = 15.0  # in a session: for the GroupManager to end a gang in good order
ENDING = (EXIT_GRACE_S, NODES_END_S, KILL_TIMEOUT_S, GANG_END_S)

# A call that has failed or was cancelled, from its rank to the process that called.
BLAME_S = 0.2  # a rank's death can end its MPI peers: until then the first death is reported
CLEAN_UP_S = 5.0  # in a rank: for a cancelled call to clean up
STUCK_S = 30.0  # in the GroupManager: for the ranks to return; then the gang is ended. An option
LOST_COMMAND_S = 5.0  # after that, in a connected process: for a command that lost a rank
STALL_TIMEOUT_S = 600.0  # at both ends of a transfer: for the next byte, or a busy rank's answer
MOST_STUCK_S = STALL_TIMEOUT_S - 2 * LOST_COMMAND_S
FAILING = (BLAME_S, CLEAN_UP_S, STUCK_S, MOST_STUCK_S + LOST_COMMAND_S, STALL_TIMEOUT_S)
