/* Sparse matrices in the C interface: taken, made, returned. */
#include "alchemist.h"

/* B = factor * A, and the sums of A's rows, in float64. */
static int scaled(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    const alchemist_sparse *A = in[0].sparse;
    if (A->dtype != ALCHEMIST_FLOAT64) return alchemist_refuse(call, "A must be float64");
    alchemist_sparse *B =
        alchemist_new_sparse(call, A->rows, A->cols, A->local_elements, A->dtype);
    alchemist_matrix *sums =
        alchemist_new_vector(call, A->rows, ALCHEMIST_FLOAT64, ALCHEMIST_ROW_BLOCKS);
    if (B == NULL || sums == NULL) return ALCHEMIST_FAILED;
    if (sums->local_rows != A->local_rows) return alchemist_fail(call, "rows differ");
    if (B->index != A->index) return alchemist_fail(call, "indices differ");
    size_t index = A->index == ALCHEMIST_INT32 ? 4 : 8;
    memcpy(B->starts, A->starts, (size_t)(A->local_rows + 1) * index);
    memcpy(B->columns, A->columns, (size_t)A->local_elements * index);
    for (int64_t i = 0; i < A->local_rows; i++)
        for (int64_t k = alchemist_start(A, i); k < alchemist_start(A, i + 1); k++) {
            ((double *)B->data)[k] = in[1].number * ((const double *)A->data)[k];
            ((double *)sums->data)[i] += ((const double *)A->data)[k];
        }
    out[0].sparse = B;
    out[1].matrix = sums;
    return ALCHEMIST_OK;
}

/* The largest column number, and the argument itself. */
static int columns(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    const alchemist_sparse *A = in[0].sparse;
    int64_t last = -1;
    for (int64_t k = 0; k < A->local_elements; k++)
        if (alchemist_column(A, k) > last) last = alchemist_column(A, k);
    MPI_Allreduce(MPI_IN_PLACE, &last, 1, MPI_INT64_T, MPI_MAX, call->comm);
    out[0].integer = last;
    out[1].sparse = A;
    return ALCHEMIST_OK;
}

/* A matrix whose arrays were not filled. */
static int broken(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in;
    alchemist_sparse *B = alchemist_new_sparse(call, 3, 3, 2, ALCHEMIST_FLOAT64);
    if (B == NULL) return ALCHEMIST_FAILED;
    memset(B->starts, 0xff, (size_t)(B->local_rows + 1) * 4);
    memset(B->columns, 0, 2 * 4);
    out[0].sparse = B;
    return ALCHEMIST_OK;
}

static const alchemist_routine routines[] = {
    {.name = "scaled", .doc = "B = factor * A.", .run = scaled,
     .parameters = ALCHEMIST_PARAMETERS({"A", ALCHEMIST_SPARSE, "of float64"},
                                        {"factor", ALCHEMIST_FLOAT, "the factor", "2.0"}),
     .results = ALCHEMIST_RESULTS({"B", ALCHEMIST_SPARSE, "factor * A"},
                                  {"sums", ALCHEMIST_MATRIX, "of rows of A"})},
    {.name = "columns", .doc = "The last column with an element.", .run = columns,
     .parameters = ALCHEMIST_PARAMETERS({"A", ALCHEMIST_SPARSE, "any"}),
     .results = ALCHEMIST_RESULTS({"last", ALCHEMIST_INT, "its number"},
                                  {"A", ALCHEMIST_SPARSE, "the argument"})},
    {.name = "broken", .doc = "Fails.", .run = broken,
     .results = ALCHEMIST_RESULTS({"B", ALCHEMIST_SPARSE, "none"})},
    {0}};

ALCHEMIST_LIBRARY("sparse", "Sparse matrices in C.", routines)
