"""The table of MPI calls that can wait, and the source of their layer (`mpi_waits.c`).

A letter is a parameter: a, A: a buffer that is read, that is written; n, N: a count, an array of
counts; D: an array of displacements; t, T: a datatype, an array of them; o: an operation; i: an
integer (a rank, a tag); l, L: a long, its address; c: the call's communicator; w, f: a window, a
file; W, F: the address of one; m: an address of the communicator that the call makes; h: another
handle; p: another pointer; r: an address of requests; s: of statuses. Calls with n, N or D have a
form with wider ones, `_c`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

TYPES = {
    "a": "const void *", "A": "void *", "n": "int ", "N": "const int *", "D": "const int *",
    "t": "H ", "T": "const H *", "o": "H ", "i": "int ", "c": "H ", "w": "H ", "f": "H ",
    "W": "int32_t *", "F": "H *", "m": "int32_t *", "p": "void *", "h": "H ", "r": "int32_t *",
    "s": "Status *", "l": "long ", "L": "long *",
}  # fmt: skip
CASTS = {"w": "(int32_t)", "f": "", "W": "*", "F": "*"}  # handles of windows have 32 bits
WIDE = {"n": "long ", "N": "const long *", "D": "const long *"}

# Calls that begin with a barrier.
TOGETHER = """
Gatherv antANDtic
Scatterv aNDtAntic
Allgatherv antANDtc
Alltoallv aNDtANDtc
Alltoallw aNDTANDTc
Reduce_scatter aANtoc
Neighbor_allgather antAntc
Neighbor_allgatherv antANDtc
Neighbor_alltoall antAntc
Neighbor_alltoallv aNDtANDtc
Neighbor_alltoallw aNDTANDTc
Comm_dup cm
Comm_dup_with_info chm
Comm_split ciim
Comm_split_type ciihm
Comm_create chm
Cart_create cippim
Cart_sub cpm
Graph_create cippim
Dist_graph_create cipppphim
Dist_graph_create_adjacent cippipphim
Win_create AlnhcW
Win_create_dynamic hcW
Win_allocate lnhcpW
Win_allocate_shared lnhcpW
Win_fence iw
Win_free W
File_open cpihF
File_close F
File_set_view flttph
File_set_size fl
File_preallocate fl
File_set_atomicity fi
File_sync f
File_read_all fAnts
File_write_all fants
File_read_at_all flAnts
File_write_at_all flants
File_read_ordered fAnts
File_write_ordered fants
"""
# Those that do so if they are large. `mpi_waits.c` has them.
LARGE = """
Bcast Antic
Allgather antAntc
Gather antAntic
Scatter antAntic
Alltoall antAntc
Allreduce aAntoc
Reduce aAntoic
Scan aAntoc
Exscan aAntoc
Reduce_scatter_block aAntoc
"""
# Those that may write into their caller's memory until their request is complete.
STARTED = """
Ibcast Anticr
Iallgather antAntcr
Iallgatherv antANDtcr
Igather antAnticr
Igatherv antANDticr
Iscatter antAnticr
Iscatterv aNDtAnticr
Ialltoall antAntcr
Ialltoallv aNDtANDtcr
Ialltoallw aNDTANDTcr
Iallreduce aAntocr
Ireduce aAntoicr
Iscan aAntocr
Iexscan aAntocr
Ireduce_scatter aANtocr
Ireduce_scatter_block aAntocr
Ineighbor_allgather antAntcr
Ineighbor_allgatherv antANDtcr
Ineighbor_alltoall antAntcr
Ineighbor_alltoallv aNDtANDtcr
Ineighbor_alltoallw aNDTANDTcr
Comm_idup cmr
Isendrecv antiiAntiicr
Isendrecv_replace Antiiiicr
"""
# Others that `mpi_waits.c` has or uses.
OTHERS = """
Barrier c
Recv Antiics
Irecv Antiicr
Recv_init Antiicr
Mrecv Antrs
Imrecv Antrr
Send antiic
Ssend antiic
Rsend antiic
Isend antiicr
Issend antiicr
Irsend antiicr
Sendrecv antiiAntiics
Sendrecv_replace Antiiiics
Probe iics
Mprobe iicrs
Iprobe iicps
Improbe iicprs
Wait rs
Waitall irs
Waitany irps
Waitsome irpps
Test rps
Testall irps
Testany irpps
Testsome irpps
Request_free r
Request_get_status hps
Cancel r
Ibarrier cr
Reduce_local aAnto
Pack aitpipc
Unpack aipAitc
Pack_c altplLc
Pack_size_c ltcL
Type_size tp
Type_get_extent tLL
Comm_size cp
Comm_rank cp
Comm_test_inter cp
Comm_free m
Comm_disconnect m
Comm_get_attr cipp
Comm_set_attr cip
Comm_create_keyval pppp
Win_wait w
Win_test wp
Win_shared_query hiLpp
Add_error_class p
Add_error_code ip
Add_error_string ip
"""


def forms(table: str) -> Iterator[tuple[str, str, list[str]]]:
    """For each function of a table: its name without ``MPI_``, its letters, its types."""
    for name, letters in map(str.split, filter(None, table.splitlines())):
        yield name, letters, [TYPES[letter] for letter in letters]
        if set(letters) & set(WIDE):
            yield f"{name}_c", letters, [{**TYPES, **WIDE}[letter] for letter in letters]


def _defined(name: str, letters: str, types: list[str], kind: str) -> str:
    """The function of one call."""
    names = dict(enumerate(f"x{i}" for i in range(len(letters))))
    at = {letter: names[letters.rindex(letter)] for letter in letters}
    given = ", ".join(names.values())
    # Windows and files have no communicator of their own: a duplicate of theirs.
    where = next(letter for letter in "cwfWF" if letter in at)
    comm = at["c"] if "c" in at else f"shadow({CASTS[where]}{at[where]})"
    taken = ", ".join(map(str.__add__, types, names.values()))
    if kind == "started":
        return f"""int MPI_{name}({taken}) {{
    *{at["r"]} = REQUEST_NULL;
    BEGIN({name}, {comm}, {given});
    if (!(e = p_{name}({given}))) note(*{at["r"]}, 1);
    return e;
}}"""
    begin = f"BEGIN({name}, {comm}, {given});"
    head, begin = f"int MPI_{name}({taken})", begin if kind == "together" else "int e;"
    if kind == "large":
        head = f"static int together_{name}({taken})"
    made = f"*{at['m']} = COMM_NULL;" if "m" in at else ""
    owner = at.get("W", at.get("F"))
    after = f"if (!e) new_shadow(*{owner}, {comm});" if owner and "c" in at else ""
    before = f"drop_shadow(*{owner});" if owner and "c" not in at else ""
    return f"""{head} {{
    {begin} {made}
    if ((e = meet({comm}, "{name}", 0))) return e;
    double begun = whole("{name}"); {before}
    e = p_{name}({given}); {after}
    end_whole(begun);
    return e;
}}"""


def source() -> str:
    """The C source of the layer."""
    every = list(forms(TOGETHER + LARGE + STARTED + OTHERS))
    pointers = [f"static int (*p_{name})({', '.join(types)});" for name, _, types in every]
    symbols = [f'    {{"PMPI_{name}", (void **)&p_{name}}},' for name, _, _ in every]
    kinds = {"together": TOGETHER, "large": LARGE, "started": STARTED}
    functions = [_defined(*form, kind) for kind, table in kinds.items() for form in forms(table)]
    struct = "typedef struct { const char *name; void **place; } Symbol;"
    table = [struct, "static const Symbol symbols[] = {", *symbols, "    {0}};"]
    text = Path(__file__).with_name("mpi_waits.c").read_text()
    text = text.replace("/* @pointers */", "\n".join([*pointers, *table]))
    return text.replace("/* @functions */", "\n".join(functions))
