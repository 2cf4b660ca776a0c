"""Runs the blocks of a page in one process, which joins Ray once: ``run_page.py PAGE RESULTS``.

PAGE is a JSON list of blocks; RESULTS gets a JSON line for each block when it is over.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
import types


def main() -> None:
    with open(sys.argv[1]) as file:
        blocks = json.load(file)
    sys.argv[1:] = []
    failed = ""
    with open(RESULTS, "w", buffering=1) as results:
        for block in blocks:
            if block["fresh"]:
                program = types.ModuleType("__main__")  # functions are pickled by value from there
                sys.modules["__main__"] = program
                failed = ""
            said, error = io.StringIO(), failed
            if not failed:
                try:
                    code = compile(block["source"], block["name"], "exec", dont_inherit=True)
                    with contextlib.redirect_stdout(said):
                        exec(code, program.__dict__)
                except BaseException:
                    error = traceback.format_exc()
                    failed = f"{block['name']} has failed, which this block continues"
            print(json.dumps({**block, "output": said.getvalue(), "error": error}), file=results)


RESULTS = sys.argv[2]
main()
