/* Fields of a cell as matrices: pictures and saved states. */
#include "simulation.h"

/* Fill each rank's part of a matrix from the whole matrix in column-major order. */
static void fill(alchemist_matrix *A, const double *columns) {
    double *to = A->data;
    for (int64_t j = 0; j < A->local_cols; j++)
        for (int64_t i = 0; i < A->local_rows; i++)
            to[i + j * A->leading_dimension] =
                columns[alchemist_global_row(A, i) + alchemist_global_col(A, j) * A->rows];
}

/* The whole cell as a matrix: `rows` numbers of each of its columns, which `describe` writes. */
static int give_columns(alchemist_call *call, alchemist_value *out, const simulation *S,
                        void (*describe)(const simulation *, int64_t, double *), int64_t rows,
                        alchemist_layout layout) {
    const lattice *L = S->L;
    if (lattice_whole(call, L)) return ALCHEMIST_FAILED;
    double *mine = malloc((size_t)(L->columns * rows) * sizeof(double)), *all;
    if (mine == NULL)
        return alchemist_fail(call, "not enough memory for the columns of rank %d", call->rank);
    for (int64_t x = 0; x < L->columns; x++) describe(S, x, mine + x * rows);
    int code = gather_columns(call, L, mine, rows, &all);
    free(mine);
    if (code != ALCHEMIST_OK) return code;
    alchemist_matrix *A = alchemist_new(call, rows, L->cell.width, ALCHEMIST_FLOAT64, layout);
    if (A != NULL) fill(A, all);
    free(all);
    out->matrix = A;
    return A == NULL ? ALCHEMIST_FAILED : ALCHEMIST_OK;
}

static void temperatures(const simulation *S, int64_t x, double *column) {
    *column = COLD;
    for (int64_t y = S->L->cell.height - 1; y >= 0; y--)
        *++column = lattice_fluid(S->L, x, y).temperature;
    *++column = S->L->bottom[x];
}

ROUTINE(routine_render) {
    (void)in;
    SIMULATION(S);
    const int64_t rows = S->L->cell.height + 2;
    return give_columns(call, out, S, temperatures, rows, ALCHEMIST_STAR_STAR);
}

/* A state has one column per column of the cell: its record, then the numbers common to all: steps,
 * actions, and the state of the generator in two halves. */
enum { STEPS, ACTIONS, RANDOM_HIGH, RANDOM_LOW, COMMON };

static void state(const simulation *S, int64_t x, double *column) {
    double *common = column + lattice_record(S->L);
    lattice_save(S->L, x, column);
    common[STEPS] = (double)S->L->steps;
    common[ACTIONS] = (double)S->actions;
    common[RANDOM_HIGH] = (double)(S->random >> 32);
    common[RANDOM_LOW] = (double)(S->random & 0xFFFFFFFFu);
}

ROUTINE(routine_save_state) {
    (void)in;
    SIMULATION(S);
    return give_columns(call, out, S, state, lattice_record(S->L) + COMMON, ALCHEMIST_STAR_VC);
}

ROUTINE(routine_load_state) {
    (void)out;
    SIMULATION(S);
    lattice *L = S->L;
    const int64_t record = lattice_record(L), rows = record + COMMON;
    const alchemist_matrix *A = in[0].matrix;
    if (A->dtype != ALCHEMIST_FLOAT64 || A->rows != rows || A->cols != L->cell.width)
        return alchemist_refuse(call,
                                "a state of this cell is a float64 matrix of shape %lld x %lld, "
                                "as save_state() returns it; this one is %lld x %lld",
                                (long long)rows, (long long)L->cell.width, (long long)A->rows,
                                (long long)A->cols);
    if ((A = alchemist_to_layout(call, A, ALCHEMIST_STAR_STAR)) == NULL) return ALCHEMIST_FAILED;
    const double *columns = A->data;
    for (int64_t x = 0; x < L->columns; x++)
        lattice_load(L, x, columns + (L->first + x) * A->leading_dimension);
    const double *common = columns + record;
    L->steps = (int64_t)common[STEPS];
    S->actions = (int64_t)common[ACTIONS];
    S->random = (uint64_t)common[RANDOM_HIGH] << 32 | (uint64_t)common[RANDOM_LOW];
    S->measured = 0;
    return ALCHEMIST_OK;
}
