/* A library for tests: every type there and back, state, progress, every way to fail. */
#define _POSIX_C_SOURCE 200809L
#include <alchemist.h>

#include <time.h>

static int echo(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)call;
    for (int i = 0; i < 10; i++) out[i] = in[i];
    return ALCHEMIST_OK;
}

/* The matrix says of every element where it is: 1000 * row + column. */
static int coordinates(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    alchemist_matrix *A = alchemist_new(call, in[0].integer, in[1].integer, ALCHEMIST_INT64,
                                        (alchemist_layout)in[2].integer);
    if (A == NULL) return ALCHEMIST_FAILED;
    int64_t *data = A->data;
    for (int64_t j = 0; j < A->local_cols; j++)
        for (int64_t i = 0; i < A->local_rows; i++)
            data[i + j * A->leading_dimension] =
                1000 * alchemist_global_row(A, i) + alchemist_global_col(A, j);
    out[0].matrix = A;
    return ALCHEMIST_OK;
}

/* What a rank is told of a matrix, in the order of the fields. */
static int about(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    const alchemist_matrix *A = in[0].matrix;
    int64_t *told = call->host->allocate(call, 16 * sizeof *told);
    if (told == NULL) return ALCHEMIST_FAILED;
    int64_t fields[16] = {A->rows,       A->cols,       A->dtype,     A->layout,    A->grid_height,
                          A->grid_width, A->local_rows, A->local_cols, A->leading_dimension,
                          A->row_shift,  A->row_stride, A->col_shift, A->col_stride,
                          A->row_block,  A->col_block,  A->dimensions};
    memcpy(told, fields, sizeof fields);
    out[0].integers = told;
    out[0].count = 16;
    return ALCHEMIST_OK;
}

/* ScaLAPACK's descriptor of a matrix, for the context 7. */
static int descriptor(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    int found[9];
    if (alchemist_descriptor(in[0].matrix, 7, found) != ALCHEMIST_OK)
        return alchemist_refuse(call, "no descriptor");
    int64_t *told = call->host->allocate(call, 9 * sizeof *told);
    if (told == NULL) return ALCHEMIST_FAILED;
    for (int i = 0; i < 9; i++) told[i] = found[i];
    out[0].integers = told;
    out[0].count = 9;
    return ALCHEMIST_OK;
}

/* A mask: whether the rows are even; a vector, or with as many dimensions as the caller wants. */
static int even(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    alchemist_matrix *B =
        alchemist_new_vector(call, in[0].integer, ALCHEMIST_BOOL8, ALCHEMIST_VC_STAR);
    if (B == NULL) return ALCHEMIST_FAILED;
    char *data = B->data;
    for (int64_t i = 0; i < B->local_rows; i++) data[i] = alchemist_global_row(B, i) % 2 == 0;
    B->dimensions = (int32_t)in[1].integer;
    out[0].matrix = B;
    return ALCHEMIST_OK;
}

static int optional(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)call;
    out[0].flag = in[0].given;
    out[1].integer = in[1].given ? in[1].integer : -1;
    return ALCHEMIST_OK;
}

static int count(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in;
    int64_t *calls = call->state ? call->state : calloc(1, sizeof *calls);
    call->state = calls;
    out[0].integer = ++*calls;
    return ALCHEMIST_OK;
}

static int fail(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)out;
    int64_t rank = in[0].integer;
    if (rank == -1 || rank == call->rank) {
        if (strcmp(in[1].string, "silent") == 0) return 77;
        if (strcmp(in[1].string, "refuse") == 0) return alchemist_refuse(call, "no such luck");
        return alchemist_fail(call, "no luck: %s", in[1].string);
    }
    double x = 1;
    return alchemist_allreduce(call, &x, &x, 1, MPI_DOUBLE, MPI_SUM); /* waits for the others */
}

/* Works until it is told to stop. */
static int work(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)out;
    for (int i = 0; i < (int)(in[0].number * 1000); i++) {
        int code = alchemist_check(call);
        if (code) return in[1].flag ? alchemist_fail(call, "stopped") : code;
        alchemist_progress(call, i / (in[0].number * 1000), "working");
        const struct timespec millisecond = {0, 1000000};
        nanosleep(&millisecond, NULL);
    }
    return ALCHEMIST_OK;
}

/* A result that does not belong to this call. */
static int bad(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    static alchemist_matrix nobody;
    (void)call;
    (void)in;
    out[0].matrix = &nobody;
    return ALCHEMIST_OK;
}

/* Values on rank 0 only, as the header allows. */
static int at_rank_0(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in;
    if (call->rank != 0) return ALCHEMIST_OK;
    out[0].string = "from rank 0";
    out[1].integer = 7;
    return ALCHEMIST_OK;
}

/* A = factor A, in place. */
static int grow(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    const alchemist_matrix *A = in[0].matrix;
    (void)out;
    if (A->dtype != ALCHEMIST_FLOAT64) return alchemist_refuse(call, "A must be of float64");
    for (int64_t j = 0; j < A->local_cols; j++)
        for (int64_t i = 0; i < A->local_rows; i++)
            ((double *)A->data)[i + j * A->leading_dimension] *= in[2].complex_number[0];
    return ALCHEMIST_OK;
}

static void closed(void *state) {
    const char *path = getenv("EVERY_CLOSED");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file != NULL) {
        fprintf(file, "%lld\n", (long long)*(int64_t *)state);
        fclose(file);
    }
    free(state);
}

static const alchemist_routine routines[] = {
    {.name = "echo", .doc = "Everything back.", .run = echo,
     .parameters = ALCHEMIST_PARAMETERS(
         {"A", ALCHEMIST_MATRIX, "a matrix"}, {"i", ALCHEMIST_INT, "an int", "3"},
         {"x", ALCHEMIST_FLOAT, "a float", "0.5"}, {"z", ALCHEMIST_COMPLEX, "a complex", "1.5"},
         {"flag", ALCHEMIST_BOOL, "a bool", "true"},
         {"text", ALCHEMIST_STRING, "a string", "\"hello\""},
         {"ints", ALCHEMIST_INTS, "ints", "[1, 2]"}, {"floats", ALCHEMIST_FLOATS, "floats", "[]"},
         {"flags", ALCHEMIST_BOOLS, "bools", "[true, false]"},
         {"texts", ALCHEMIST_STRINGS, "strings", "[\"a\", \"b\"]"}),
     .results = ALCHEMIST_RESULTS(
         {"A", ALCHEMIST_MATRIX, "a matrix"}, {"i", ALCHEMIST_INT, "an int"},
         {"x", ALCHEMIST_FLOAT, "a float"}, {"z", ALCHEMIST_COMPLEX, "a complex"},
         {"flag", ALCHEMIST_BOOL, "a bool"}, {"text", ALCHEMIST_STRING, "a string"},
         {"ints", ALCHEMIST_INTS, "ints"}, {"floats", ALCHEMIST_FLOATS, "floats"},
         {"flags", ALCHEMIST_BOOLS, "bools"}, {"texts", ALCHEMIST_STRINGS, "strings"})},
    {.name = "coordinates", .doc = "1000 i + j.", .run = coordinates,
     .parameters = ALCHEMIST_PARAMETERS({"m", ALCHEMIST_INT, "rows"}, {"n", ALCHEMIST_INT, "columns"},
                                        {"layout", ALCHEMIST_INT, "its number"}),
     .results = ALCHEMIST_RESULTS({"A", ALCHEMIST_MATRIX, "int64"})},
    {.name = "about", .doc = "What rank 0 is told of a matrix.", .run = about,
     .parameters = ALCHEMIST_PARAMETERS({"A", ALCHEMIST_MATRIX, "a matrix"}),
     .results = ALCHEMIST_RESULTS({"fields", ALCHEMIST_INTS, "as in alchemist.h"})},
    {.name = "descriptor", .doc = "ScaLAPACK's descriptor.", .run = descriptor,
     .parameters = ALCHEMIST_PARAMETERS({"A", ALCHEMIST_MATRIX, "a matrix"}),
     .results = ALCHEMIST_RESULTS({"fields", ALCHEMIST_INTS, "as in alchemist.h"})},
    {.name = "even", .doc = "Which rows are even.", .run = even,
     .parameters = ALCHEMIST_PARAMETERS({"m", ALCHEMIST_INT, "rows"},
                                        {"dimensions", ALCHEMIST_INT, "of the result", "1"}),
     .results = ALCHEMIST_RESULTS({"B", ALCHEMIST_MATRIX, "bool"})},
    {.name = "optional", .doc = "Which arguments were given.", .run = optional,
     .parameters = ALCHEMIST_PARAMETERS({"A", ALCHEMIST_MATRIX, "a matrix", "null"},
                                        {"i", ALCHEMIST_INT, "an int", "null"}),
     .results = ALCHEMIST_RESULTS({"given", ALCHEMIST_BOOL, "A"}, {"i", ALCHEMIST_INT, "or -1"})},
    {.name = "count", .doc = "How often it was called.", .run = count,
     .results = ALCHEMIST_RESULTS({"calls", ALCHEMIST_INT, "so far"})},
    {.name = "fail", .doc = "Fails on a rank, or on all.", .run = fail,
     .parameters = ALCHEMIST_PARAMETERS({"rank", ALCHEMIST_INT, "or -1", "-1"},
                                        {"how", ALCHEMIST_STRING, "words", "\"really\""})},
    {.name = "work", .doc = "Works for the given time.", .run = work,
     .parameters = ALCHEMIST_PARAMETERS({"seconds", ALCHEMIST_FLOAT, "s", "0.02"},
                                        {"words", ALCHEMIST_BOOL, "when stopped", "false"})},
    {.name = "bad", .doc = "Returns what is no matrix.", .run = bad,
     .results = ALCHEMIST_RESULTS({"A", ALCHEMIST_MATRIX, "not really"})},
    {.name = "at_rank_0", .doc = "Values of rank 0.", .run = at_rank_0,
     .results = ALCHEMIST_RESULTS({"text", ALCHEMIST_STRING, "words"}, {"i", ALCHEMIST_INT, "7"})},
    {.name = "grow", .doc = "A = factor A, in place.", .run = grow,
     .parameters = ALCHEMIST_PARAMETERS({"A", ALCHEMIST_MATRIX_WRITTEN, "changed"},
                                        {"B", ALCHEMIST_MATRIX_READ, "not used", "null"},
                                        {"factor", ALCHEMIST_COMPLEX, "real", "[2, 0]"})},
    {0}};

ALCHEMIST_LIBRARY_CLOSED("every", "Everything that the C ABI can do.", routines, closed)
