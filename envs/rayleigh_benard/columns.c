/* Gathers the columns of all slabs on every rank. */
#include "columns.h"

/* MPI may still access the buffers of an interrupted exchange, so all of them are in one block of
 * memory, which is not freed in that case. */
typedef struct {
    double *mine, *all;
    int *counts, *shifts;
    void *memory;
} exchange;

static int have_memory(exchange *E, int size, size_t mine, size_t all) {
    E->memory = malloc((mine + all) * sizeof(double) + 2 * (size_t)size * sizeof(int));
    if (E->memory == NULL) return 0;
    E->mine = E->memory;
    E->all = E->mine + mine;
    E->counts = (int *)(E->all + all);
    E->shifts = E->counts + size;
    return 1;
}

int gather_columns(alchemist_call *call, const lattice *L, const double *mine, int64_t count,
                   double **all) {
    const size_t own = (size_t)(L->columns * count), whole = (size_t)(L->cell.width * count);
    exchange E = {0};
    MPI_Datatype column;
    MPI_Request request;
    *all = malloc(whole * sizeof(double));
    if (*all == NULL || (call->size > 1 && !have_memory(&E, call->size, own, whole))) {
        free(*all);
        return alchemist_fail(call, "not enough memory to gather %zu numbers on rank %d", whole,
                              call->rank);
    }
    if (call->size == 1) {
        memcpy(*all, mine, whole * sizeof(double));
        return ALCHEMIST_OK;
    }
    memcpy(E.mine, mine, own * sizeof(double));
    for (int r = 0; r < call->size; r++) {
        E.shifts[r] = (int)lattice_first(L->cell.width, call->size, r);
        E.counts[r] = (int)lattice_first(L->cell.width, call->size, r + 1) - E.shifts[r];
    }
    MPI_Type_contiguous((int)count, MPI_DOUBLE, &column);
    MPI_Type_commit(&column);
    int code = ALCHEMIST_OK;
    if (MPI_Iallgatherv(E.mine, (int)L->columns, column, E.all, E.counts, E.shifts, column,
                        call->comm, &request))
        code = alchemist_fail(call, "MPI could not gather columns");
    MPI_Type_free(&column); /* MPI keeps it until the exchange ends */
    if (code == ALCHEMIST_OK) code = alchemist_wait(call, &request);
    if (code != ALCHEMIST_OK) {
        free(*all);
        return code;
    }
    memcpy(*all, E.all, whole * sizeof(double));
    free(E.memory);
    return ALCHEMIST_OK;
}
