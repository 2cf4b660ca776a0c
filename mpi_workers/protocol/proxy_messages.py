"""The messages between the GroupManager and the proxy of each node, apart from `COMMANDS`.

Each is declared here, and nowhere else: its name and its fields. The handlers are the methods
`_on_` and the name, with the fields as parameters: of `Proxy` (`mpi_workers.node.proxy`) for
commands, of `Nodes` (`alchemist_ray.runtime.commands.nodes`) for events.
"""

PROXY_COMMANDS = {  # GroupManager -> proxies
    "start": "number kvs_name",  # further ranks, after `clear`: the number of such starts
    "pmi_release": "puts",
    "interrupt": "seq signal",  # end calls up to this number, with SIGINT as well
    "report_running": "seq",  # `ranks_running` follows
    "report_waits": "question",  # `waits` follows
    "clear": "matrices",  # end the ranks, and free all memory but that of these; `cleared` follows
    "shutdown": "",
}
PROXY_EVENTS = {  # proxy -> GroupManager
    "ready": "ranks addresses",  # all ranks of the node have checked in
    "pmi_barrier": "puts",
    "progress": "seq fraction text",
    "output": "seq lines",  # of type `Line`
    "rank_failed": "seq error",  # the first exception of a rank of the node in a command
    "ranks_running": "seq ranks stacks",  # those that have not returned from a call
    "waits": "question waits",  # ranks by the call of MPI in which they wait
    "rank_ended": "hostname rank cause pid tail frames",
    "endpoint_ended": "hostname cause pid",
    "node_leaving": "hostname",
    "cleared": "",
}

STDOUT, STDERR = 1, 2
Line = tuple[int, int, str]  # that a rank has printed: rank, stream, text without its newline
