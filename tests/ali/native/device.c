/* The address of a part on the GPU, for which the CPU stands in. */
#include "alchemist.h"

/* The sum of A's elements on the device, and whether they lie apart from those of the host. */
static int sum(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    const alchemist_matrix *A = in[0].matrix;
    const double *there = alchemist_device_pointer(call, A);
    if (there == NULL && A->local_rows * A->local_cols > 0) return ALCHEMIST_FAILED;
    double total = 0;
    for (int64_t i = 0; i < A->local_rows * A->local_cols; i++) total += there[i];
    MPI_Allreduce(MPI_IN_PLACE, &total, 1, MPI_DOUBLE, MPI_SUM, call->comm);
    out[0].number = total;
    out[1].flag = (const void *)there != A->data;
    return ALCHEMIST_OK;
}

static const alchemist_routine routines[] = {
    {.name = "sum", .doc = "The sum of A's elements.", .run = sum,
     .parameters = ALCHEMIST_PARAMETERS({"A", ALCHEMIST_MATRIX_READ, "of float64"}),
     .results = ALCHEMIST_RESULTS({"total", ALCHEMIST_FLOAT, "of all"},
                                  {"apart", ALCHEMIST_BOOL, "from the host's elements"})},
    {0}};

ALCHEMIST_LIBRARY("device", "Reads matrices on a GPU.", routines)
