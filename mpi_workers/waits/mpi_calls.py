"""The table of MPI calls that can wait, and the source of their layer (`mpi_waits.c`).

A letter is a parameter: a, A: a buffer that is read, that is written; n, N: a count, an array of
counts; D: an array of displacements; t, T: a datatype, an array of them; o: an operation; i: an
integer (a rank, a tag); l, L: a long, its address; c: the call's communicator; w, f: a window, a
file; W, F: the address of one; m: an address of the communicator that the call makes; h: another
handle; p: another pointer; r: an address of requests; s: of statuses. Calls with n, N or D have a
form with wider ones, `_c`. Rows of a table end with a semicolon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TYPES = {
    "a": "const void *", "A": "void *", "n": "int ", "N": "const int *", "D": "const int *",
    "t": "H ", "T": "const H *", "o": "H ", "i": "int ", "c": "H ", "w": "H ", "f": "H ",
    "W": "int32_t *", "F": "H *", "m": "int32_t *", "p": "void *", "h": "H ", "r": "int32_t *",
    "s": "Status *", "l": "long ", "L": "long *",
}  # fmt: skip
CASTS = {"w": "(int32_t)", "f": "", "W": "*", "F": "*"}  # handles of windows have 32 bits
WIDE = {"n": "long ", "N": "const long *", "D": "const long *"}

# Collectives. Each has three forms: one that waits, `I...`, and `..._init`. Of those with small
# elements, the buffers: what is read and what is written, as pointer, count and datatype; `root?`:
# by the root alone; `inplace?`: if what is read is there, too.
COLLECTIVES = """
Barrier c; Bcast Antic | | A n t; Allgather antAntc | a n t | A n*size t;
Gather antAntic | a n t | A root?n*size t; Scatter antAntic | a root?n*size t | A n t;
Alltoall antAntc | a n*size t | A n*size t; Allreduce aAntoc | a n t | A n t;
Reduce aAntoic | a n t | A root?n t; Scan aAntoc | a n t | A n t; Exscan aAntoc | a n t | A n t;
Reduce_scatter_block aAntoc | a n*size t | A inplace?n*size:n t; Reduce_scatter aANtoc;
Gatherv antANDtic; Scatterv aNDtAntic; Allgatherv antANDtc; Alltoallv aNDtANDtc;
Alltoallw aNDTANDTc; Neighbor_allgather antAntc; Neighbor_allgatherv antANDtc;
Neighbor_alltoall antAntc; Neighbor_alltoallv aNDtANDtc; Neighbor_alltoallw aNDTANDTc
"""
# Messages that wait: the call, its form that does not, what is under way.
MESSAGES = """
Recv Antiics Irecv RECEIVES; Mrecv Antrs Imrecv RECEIVES; Send antiic Isend SENDS;
Ssend antiic Issend SENDS; Rsend antiic Irsend SENDS
"""
# Operations that are under way when the call returns.
STARTED = """
Irecv Antiicr RECEIVES; Recv_init Antiicr RECEIVES; Imrecv Antrr RECEIVES; Isend antiicr SENDS;
Issend antiicr SENDS; Irsend antiicr SENDS; Ibsend antiicr SENDS; Send_init antiicr SENDS;
Ssend_init antiicr SENDS; Rsend_init antiicr SENDS; Bsend_init antiicr SENDS;
Isendrecv antiiAntiicr WRITES; Isendrecv_replace Antiiiicr WRITES; Psend_init ailtiichr SENDS;
Precv_init Ailtiichr WRITES; Comm_idup cmr WRITES; Comm_idup_with_info chmr WRITES;
Rput antilntwr SENDS; Rget Antilntwr WRITES; Raccumulate antilntowr SENDS;
Rget_accumulate antAntilntowr WRITES; File_iread fAntr WRITES; File_iread_at flAntr WRITES;
File_iread_all fAntr WRITES; File_iread_at_all flAntr WRITES; File_iread_shared fAntr WRITES;
File_iwrite fantr SENDS; File_iwrite_at flantr SENDS; File_iwrite_all fantr SENDS;
File_iwrite_at_all flantr SENDS; File_iwrite_shared fantr SENDS
"""
# Collective calls without a form that does not wait: they begin with a barrier.
TOGETHER = """
Comm_dup cm; Comm_dup_with_info chm; Comm_split ciim; Comm_split_type ciihm; Comm_create chm;
Cart_create cippim; Cart_sub cpm; Graph_create cippim; Dist_graph_create cipppphim;
Dist_graph_create_adjacent cippipphim; Win_create AlnhcW; Win_create_dynamic hcW;
Win_allocate lnhcpW; Win_allocate_shared lnhcpW; Win_fence iw; Win_free W; File_open cpihF;
File_close F; File_set_view flttph; File_set_size fl; File_preallocate fl; File_set_atomicity fi;
File_sync f; File_read_all fAnts; File_write_all fants; File_read_at_all flAnts;
File_write_at_all flants; File_read_ordered fAnts; File_write_ordered fants
"""
# Calls of some ranks, or of two groups, which MPI itself carries out.
WHOLE = """
Comm_create_group chim; Intercomm_create cihiim; Intercomm_merge cim;
Comm_create_from_group hphhm; Intercomm_create_from_groups hihiphhm
"""
EXCHANGES = """
Sendrecv antiiAntiics; Sendrecv_replace Antiiiics
"""
# Calls that return at once: of loops that end with their call, and one that sends.
POLLS = """
Iprobe iicps; Improbe iicprs; Request_get_status hps; Bsend antiic
"""
# Those that wait in a function of `mpi_waits.c`, and those that only test there. x0, ... are their
# parameters.
WAITS = """
Probe iics probe(x0, x1, x2, x3, @);
Mprobe iicrs mprobe(x0, x1, x2, x3, x4, @);
Win_wait w win_wait(x0, @);
Wait rs wait(x0, x1, @);
Waitall irs test_several(&(Several){ALL, x0, x1, NULL, NULL, x2}, NULL, 1, @);
Waitany irps test_several(&(Several){ANY, x0, x1, x2, NULL, x3}, NULL, 1, @);
Waitsome irpps test_several(&(Several){SOME, x0, x1, x3, x2, x4}, NULL, 1, @);
Test rps test_one(x0, x1, x2);
Testall irps test_several(&(Several){ALL, x0, x1, NULL, NULL, x3}, x2, 0, @);
Testany irpps test_several(&(Several){ANY, x0, x1, x2, NULL, x4}, x3, 0, @);
Testsome irpps test_several(&(Several){SOME, x0, x1, x3, x2, x4}, NULL, 0, @)
"""
# What it has whole, or uses.
OTHERS = """
Request_free r; Comm_free m; Comm_disconnect m; Buffer_attach An; Buffer_detach pp;
Buffer_detach_c pp; Cancel r; Win_test wp; Pack_c altplLc; Pack_size_c ltcL; Isend_c alhiicr;
Get_count shp; Type_size tp; Comm_size cp; Comm_rank cp; Comm_test_inter cp; Add_error_class p;
Add_error_code ip; Add_error_string ip
"""

# The fields of `alchemist_waits`: name, type in C, type in `ctypes`, meaning.
STATE = (
    ("word", "const volatile uint64_t *", "c_void_p", "of the node: what is up to it is over"),
    ("call", "uint64_t ", "c_uint64", "the number of this rank's call"),
    ("active", "int32_t ", "c_int32", "waits look at the word"),
    ("crowded", "int32_t ", "c_int32", "ranks share cores"),
    ("one_node", "int32_t ", "c_int32", "which has all ranks"),
    ("used", "int32_t ", "c_int32", "the call has used MPI"),
    ("attached", "int32_t ", "c_int32", "MPI_Buffer_attach has been called"),
    ("sequence", "uint32_t ", "c_uint32", "of collectives on communicators that outlive it"),
    ("ended", "int32_t ", "c_int32", "the error code of a wait that was left"),
    ("ours", "int32_t ", "c_int32", "the error code of freeing the gang's communicators"),
    ("requests", "int32_t ", "c_int32", "operations that the call has left under way"),
    ("messages", "int32_t ", "c_int32", "messages that it has left"),
    ("source", "int32_t ", "c_int32", "the rank that has sent the last one of them"),
    ("tag", "int32_t ", "c_int32", "its tag"),
    ("refused", "int32_t ", "c_int32", "MPI calls of native code after the end of the call"),
    ("disposable", "int32_t ", "c_int32", "the gang starts another process in place of this one"),
    ("waited_s", "double ", "c_double", "in MPI, since the start"),
    ("left_s", "double ", "c_double", "when a wait was left, by the monotonic clock"),
    ("waits_in", "char *", "c_void_p", "where others read in which MPI call this rank waits"),
    ("left_in", "const char *", "c_char_p", "the first call that was left, or NULL"),
    ("unsafe", "const char *", "c_char_p", "why this process cannot go on after the call, or NULL"),
)  # fmt: skip
SKELETON = Path(__file__).with_name("mpi_waits.c")
SLOT = 64  # bytes of the name of the call in which a rank waits, and of a program's seconds in MPI


def _rows(table: str) -> Iterator[list[str]]:
    return (row.split() for row in table.replace("\n", " ").split(";") if row.strip())


def _collectives() -> Iterator[tuple[str, str, str]]:
    """Name, letters and the buffers of each collective."""
    for row in COLLECTIVES.split(";"):
        call, _, buffers = row.partition("|")
        name, letters = call.split()
        yield name, letters, buffers


def _started() -> Iterator[tuple[str, str, str]]:
    """Name, letters and kind of each call that returns while its operation is under way."""
    for name, letters, kind in _rows(STARTED):
        yield name, letters, kind
    for name, letters, _ in _collectives():
        yield f"I{name.lower()}", f"{letters}r", "WRITES"
        yield f"{name}_init", f"{letters}hr", "WRITES"


def _every() -> Iterator[tuple[str, str]]:
    """Name and letters of every function that the layer has or calls."""
    for name, letters, _ in [*_collectives(), *_started()]:
        yield name, letters
    for table in (MESSAGES, TOGETHER, WHOLE, POLLS, WAITS, EXCHANGES, OTHERS):
        for name, letters, *_ in _rows(table):
            yield name, letters


@cache
def _collective_numbers() -> dict[str, int]:
    """Of every call that all ranks of a communicator make in the same order: a number."""
    names = [name for name, *_ in _collectives()]
    forms = [form for name in names for form in (name, f"I{name.lower()}", f"{name}_init")]
    return {name: 1 + i for i, name in enumerate([*forms, *(row[0] for row in _rows(TOGETHER))])}


def _forms(letters: str) -> Iterator[tuple[str, list[str]]]:
    """The forms of a function: ``_c`` or empty, and the types of its parameters."""
    yield "", [TYPES[letter] for letter in letters]
    if set(letters) & set(WIDE):
        yield "_c", [{**TYPES, **WIDE}[letter] for letter in letters]


class _Function:
    """The C text of one function ``MPI_...``."""

    def __init__(self, name: str, form: str, letters: str, types: list[str]) -> None:
        self.name, self.form = name, form  # ``Bcast``, and ``_c`` or empty
        self.together = _collective_numbers().get(name, 0)
        self.letters = letters
        self.names = [f"x{i}" for i in range(len(letters))]
        self.given = ", ".join(self.names)
        self.at = {letter: self.names[letters.rindex(letter)] for letter in letters}
        self.head = f"int MPI_{name}{form}({', '.join(map(str.__add__, types, self.names))})"
        # Windows and files have no communicator of their own: a duplicate of theirs.
        owner = next((letter for letter in "wfWF" if letter in self.at), "")
        self.owner = f"{CASTS[owner]}{self.at[owner]}" if owner else ""
        self.comm = self.at.get("c", f"shadow({self.owner})" if owner else "COMM_NULL")

    def text(self, *body: str, before: str = "", after: str = "") -> str:
        """The function; it looks at the word before `body`.

        `before` and `after` are done around MPI's own call while the layer is off.
        """
        lines = [
            before,
            "int e;",
            "if (!on()) {",
            f'    at("{self.name}");',
            f"    e = p_{self.name}{self.form}({self.given});",
            "    at(NULL);",
            f"    {after}",
            "    return e;",
            "}",
            f"use({self.at['c']}, {self.together});" if "c" in self.at else "",
            f'if (over()) return refused("{self.name}", CALLER);',
            *body,
        ]
        return "\n".join([f"{self.head} {{", *(f"    {x}" for x in lines if x.strip()), "}"])

    def waiting(self, started: str, kind: str) -> str:
        """It starts another form of the call, and tests that."""
        given = self.names[:-1] if "s" in self.at else self.names
        status = self.at.get("s", "IGNORE")
        return self.text(
            "int32_t request = REQUEST_NULL;",
            f"e = p_{started}{self.form}({', '.join([*given, '&request'])});",
            f"return e ? e : {self._finish(status, kind)};",
        )

    def copied(self, started: str, buffers: str) -> str:
        """A collective whose small elements are in memory of the layer meanwhile."""
        root = f"rank == {self.at['i']}" if "i" in self.at else ""
        given, described = list(self.names), []
        for buffer, name in zip(buffers.split("|"), ("in", "out"), strict=True):
            if not buffer.strip():
                described.append("NULL, 0, 0")
                continue
            letter, count, _ = buffer.split()
            pointer = self.letters.index(letter)
            n, t = (self.letters.find(one, pointer) for one in "nt")  # the next ones
            every = f"x{n} * (long)size"
            elements = {
                "n": f"x{n}",
                "n*size": every,
                "root?n": f"{root} ? x{n} : 0",
                "root?n*size": f"{root} ? {every} : 0",
                "inplace?n*size:n": f"x0 == IN_PLACE ? {every} : x{n}",
            }[count]
            described.append(f"x{pointer}, {elements}, x{t}")
            given[pointer] = f"copies.{name}"
        ranks = f"p_Comm_size({self.comm}, &size);" * ("size" in buffers)
        ranks += f" p_Comm_rank({self.comm}, &rank);" * ("root" in buffers)
        return self.text(
            *(f"int {name} = 0;" for name in ("size", "rank") if name in ranks),
            "int32_t request = REQUEST_NULL;",
            ranks,
            f"Copies copies = copied({', '.join(described)}, {self.at.get('o', 'SUM')}, "
            f"{self.comm});",
            f"e = p_{started}{self.form}({', '.join([*given, '&request'])});",
            f"if (!e) e = {self._finish('IGNORE', 'copies.all ? COPIED : WRITES')};",
            "give_back(&copies, e);",
            "return e;",
        )

    def _finish(self, status: str, kind: str) -> str:
        return f'finish(&request, {status}, {kind}, {self.comm}, "{self.name}", CALLER)'

    def started(self, kind: str) -> str:
        """It returns while its operation is under way."""
        note = f"note(*{self.at['r']}, {self.comm}, {kind});"
        made = f"made(*{self.at['m']});" if "m" in self.at else ""
        return self.text(
            f"e = p_{self.name}{self.form}({self.given});",
            f"if (!e) {{ {note} {made} }}" if made else f"if (!e) {note}",
            "return e;",
            before=f"*{self.at['r']} = REQUEST_NULL;",
        )

    def whole(self, *, together: bool) -> str:
        """MPI's own call, when all ranks are in it (`together`), or at once."""
        makes, owns = "m" in self.at, "W" in self.at or "F" in self.at
        begins, ends = owns and "c" in self.at, owns and "c" not in self.at
        meet = f'if ((e = meet({self.comm}, "{self.name}", CALLER))) return e;'
        after = f"if (!e) made(*{self.at['m']});" if makes else ""
        after += f"if (!e) new_shadow(*{self.at.get('W', self.at.get('F'))}, {self.comm});" * begins
        return self.text(
            meet if together else "",
            f'const double begun = whole("{self.name}");',
            f"drop_shadow({self.owner});" * ends,
            f"e = p_{self.name}{self.form}({self.given});",
            after,
            "end_whole(begun);",
            "return e;",
            after=f"if (!e) forget_shadow({self.owner});" * owns,
        )

    def calling(self, expression: str) -> str:
        """It returns the value of an expression, in which ``@`` is for the call's name."""
        return self.text("return " + expression.replace("@", f'"{self.name}", CALLER') + ";")

    def exchanging(self) -> str:
        """A message each way: the part that is received can be given up."""
        replace = self.name.endswith("replace")
        a, n, t, to, tag = self.names[:5]
        into = ", ".join(self.names[:3] if replace else self.names[5:8])
        source, its, c, status = self.names[-4:]
        packed = [
            "long size = 0, position = 0;",
            "char *copy = NULL;",
            f"if ((e = p_Pack_size_c({n}, {t}, {c}, &size))) return e;",
            "if ((copy = malloc((size_t)size + 1)) == NULL) abort();",
            f"e = p_Pack_c({a}, {n}, {t}, copy, size, &position, {c});",
            "if (e) { free(copy); return e; }",
        ]
        send = f"p_Isend{self.form}({a}, {n}, {t}, {to}, {tag}, {c}, &request[1])"
        if replace:
            send = f"p_Isend_c(copy, position, PACKED, {to}, {tag}, {c}, &request[1])"
        return self.text(
            "int32_t request[2] = {REQUEST_NULL, REQUEST_NULL};",
            *packed * replace,
            f"e = p_Irecv{self.form}({into}, {source}, {its}, {c}, &request[0]);",
            f"if (!e && (e = {send})) abandon(&request[0], RECEIVES, {c});",
            f'else if (!e) e = finish_both(request, {status}, {c}, "{self.name}", CALLER);',
            "if (e != state->ended) free(copy);" * replace,
            "return e;",
        )


def _functions() -> Iterator[str]:
    """The C text of every function that the layer has."""

    def forms(name: str, letters: str) -> Iterator[_Function]:
        return (_Function(name, form, letters, types) for form, types in _forms(letters))

    for name, letters, buffers in _collectives():
        for function in forms(name, letters):
            nonblocking = f"I{name.lower()}"
            if buffers:
                yield function.copied(nonblocking, buffers)
            else:
                yield function.waiting(nonblocking, "COPIED" if name == "Barrier" else "WRITES")
    for name, letters, nonblocking, kind in _rows(MESSAGES):
        yield from (function.waiting(nonblocking, kind) for function in forms(name, letters))
    for name, letters, kind in _started():
        yield from (function.started(kind) for function in forms(name, letters))
    for name, letters in _rows(EXCHANGES):
        yield from (function.exchanging() for function in forms(name, letters))
    for table in (TOGETHER, WHOLE):
        for name, letters in _rows(table):
            together = table is TOGETHER
            yield from (function.whole(together=together) for function in forms(name, letters))
    for name, letters in _rows(POLLS):
        yield from (f.calling(f"p_{name}({f.given})") for f in forms(name, letters))
    for name, letters, *expression in _rows(WAITS):
        yield from (f.calling(" ".join(expression)) for f in forms(name, letters))


def source() -> str:
    """The C source of the layer."""
    pointers, symbols = {}, {}
    for name, letters in _every():
        for form, types in _forms(letters):
            pointers[name + form] = f"static int (*p_{name}{form})({', '.join(types)});"
            symbols[name + form] = f'    {{"PMPI_{name}{form}", (void **)&p_{name}{form}}},'
    text = SKELETON.read_text()
    for place, lines in {
        "state": (f"    {kind}{name}; /* {what} */" for name, kind, _, what in STATE),
        "pointers": pointers.values(),
        "symbols": symbols.values(),
        "functions": _functions(),
    }.items():
        text = text.replace(f"/* @{place} */", "\n".join(lines))
    return text.replace("@slot", str(SLOT)).replace("@version", version())


@cache
def version() -> str:
    """The version of these sources, which a library that was built of them has too."""
    sources = Path(__file__).with_name("mpi_calls.py"), SKELETON
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
