/* A simulator in C for tests: a ring of springs whose sum all ranks share. Its state is call->state. */
#include <alchemist.h>

enum { SIZE = 4 };
typedef struct { double x[SIZE]; int64_t seed; int steps, fail_at; } spring;

static spring *state(alchemist_call *call) {
    if (call->state == NULL) call->state = calloc(1, sizeof(spring));
    return (spring *)call->state;
}

static int setup(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)out;
    const char *found = strstr(in[0].string, "fail_at");
    state(call)->fail_at = found ? atoi(found + 9) : 0;
    return ALCHEMIST_OK;
}

static int spec(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)call, (void)in;
    out[0].string =
        "{\"name\": \"spring\", \"observation\": {\"shape\": [2, 2], \"low\": -9, \"high\": 9},"
        " \"action\": {\"shape\": [2], \"low\": -1, \"high\": 1}, \"info\": [\"size\"],"
        " \"render\": {\"field\": \"x\"}}";
    return ALCHEMIST_OK;
}

static int seed(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)out;
    state(call)->seed = in[0].integer;
    return ALCHEMIST_OK;
}

static int reset(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in, (void)out;
    spring *s = state(call);
    for (int i = 0; i < SIZE; i++) s->x[i] = (double)(i + s->seed % 7);
    s->steps = 0;
    return ALCHEMIST_OK;
}

static int step(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)out;
    spring *s = state(call);
    if (++s->steps == s->fail_at && call->rank == call->size - 1)
        return alchemist_fail(call, "the spring broke in step %d", s->steps);
    for (int i = 0; i < SIZE; i++) s->x[i] += in[0].numbers[i % 2] / call->size;
    double sum[SIZE];
    int code = alchemist_allreduce(call, s->x, sum, SIZE, MPI_DOUBLE, MPI_SUM);
    for (int i = 0; i < SIZE && code == ALCHEMIST_OK; i++) s->x[i] = sum[i] / call->size;
    return code;
}

static int get_state(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in;
    out[0].numbers = state(call)->x;
    out[0].count = SIZE;
    return ALCHEMIST_OK;
}

static int get_score(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in;
    if (call->rank != 0) return ALCHEMIST_OK; /* rank 0's values count */
    double *score = (double *)call->host->allocate(call, 2 * sizeof(double));
    score[0] = state(call)->x[0];
    score[1] = call->size;
    out[0].numbers = score;
    out[0].count = 2;
    return ALCHEMIST_OK;
}

static int is_terminated(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in;
    out[0].flag = state(call)->x[0] > 5.0;
    return ALCHEMIST_OK;
}

static int render(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in;
    alchemist_matrix *field = alchemist_new(call, 2, SIZE, ALCHEMIST_FLOAT64, ALCHEMIST_VC_STAR);
    if (field == NULL) return ALCHEMIST_FAILED;
    for (int64_t j = 0; j < field->local_cols; j++)
        for (int64_t i = 0; i < field->local_rows; i++)
            ((double *)field->data)[i + j * field->leading_dimension] =
                state(call)->x[j] + 10.0 * (double)alchemist_global_row(field, i);
    out[0].matrix = field;
    return ALCHEMIST_OK;
}

static const alchemist_routine routines[] = {
    {"setup", "Options.", setup,
     ALCHEMIST_PARAMETERS({"config", ALCHEMIST_STRING, "JSON", "\"{}\""}), NULL},
    {"spec", "What it is.", spec, NULL, ALCHEMIST_RESULTS({"spec", ALCHEMIST_STRING, "JSON"})},
    {"seed", "For the next reset.", seed,
     ALCHEMIST_PARAMETERS({"seed", ALCHEMIST_INT, "the seed", NULL}), NULL},
    {"reset", "A new episode.", reset, NULL, NULL},
    {"step", "A time step.", step,
     ALCHEMIST_PARAMETERS({"action", ALCHEMIST_FLOATS, "two forces", NULL}), NULL},
    {"get_state", "Where it is.", get_state, NULL,
     ALCHEMIST_RESULTS({"x", ALCHEMIST_FLOATS, "places"})},
    {"get_score", "The reward.", get_score, NULL,
     ALCHEMIST_RESULTS({"score", ALCHEMIST_FLOATS, "the first place, ranks"})},
    {"is_terminated", "Too far?", is_terminated, NULL,
     ALCHEMIST_RESULTS({"over", ALCHEMIST_BOOL, "whether"})},
    {"render", "A field.", render, NULL, ALCHEMIST_RESULTS({"field", ALCHEMIST_MATRIX, "2 x 4"})},
    {0}};

ALCHEMIST_LIBRARY_CLOSED("spring", "A ring of springs.", routines, free)
