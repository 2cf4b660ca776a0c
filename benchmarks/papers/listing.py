"""The session of Rothauge et al. (2019), Figure 3, as a program; `session` runs it.

`PORT`, `testlib_path` and `rank` are given by `session`. Beyond the figure are only `verbose=True`,
which prints the workers, `print`, and the last line.
"""

import numpy as np

from alchemist_ray import AlchemistSession

als = AlchemistSession(verbose=True)
als.connect_to_alchemist("0.0.0.0", PORT)  # noqa: F821
als.request_workers(3)
TestLib = als.load_library("TestLib", testlib_path)  # noqa: F821
A = np.random.rand(1000, 1000)
A_handle = als.send_matrix(matrix=A, print_times=True, layout="VC_STAR")
S_handle, U_handle, V_handle = TestLib.truncated_svd(A_handle, rank)  # noqa: F821
S = als.fetch_matrix(S_handle, print_times=True)
print(np.flipud(S).transpose())
als.stop()
