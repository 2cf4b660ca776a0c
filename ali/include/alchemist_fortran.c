/* The C side of alchemist.f90: compile both, with the gang's mpicc, into a library or program in
 * Fortran. Fortran cannot call inline functions, so those of the headers are ordinary ones here. */
#define ALCHEMIST_API
#include "alchemist_client.h"

/* --- the description of a library --- */

enum { ALCHEMIST_F_MOST = 64 }; /* routines, and parameters or results of one */

struct alchemist_f_library {
    alchemist_library library;
    alchemist_routine routines[ALCHEMIST_F_MOST + 1];
    int count, parameters, results; /* how many routines, and of the last one its own */
};

static void *alchemist_f_zeros(size_t count, size_t bytes) {
    void *memory = calloc(count, bytes);
    if (memory == NULL) abort();
    return memory;
}

/* The next free entry of a list, whose last entry stays zero; of a full one the last before it. */
static int alchemist_f_next(int *used) {
    return *used < ALCHEMIST_F_MOST ? (*used)++ : ALCHEMIST_F_MOST - 1;
}

void *alchemist_f_new_library(const char *name, const char *doc) {
    struct alchemist_f_library *made = alchemist_f_zeros(1, sizeof *made);
    made->library = (alchemist_library){ALCHEMIST_ABI, strdup(name), strdup(doc), made->routines, NULL};
    return made;
}

void alchemist_f_add_routine(struct alchemist_f_library *library, const char *name, const char *doc,
                             alchemist_function run) {
    library->routines[alchemist_f_next(&library->count)] = (alchemist_routine){
        strdup(name), strdup(doc), run,
        alchemist_f_zeros(ALCHEMIST_F_MOST + 1, sizeof(alchemist_parameter)),
        alchemist_f_zeros(ALCHEMIST_F_MOST + 1, sizeof(alchemist_result))};
    library->parameters = library->results = 0;
}

void alchemist_f_add_parameter(struct alchemist_f_library *library, const char *name, int type,
                               const char *doc, const char *default_value) {
    alchemist_routine *routine = &library->routines[library->count - 1];
    ((alchemist_parameter *)routine->parameters)[alchemist_f_next(&library->parameters)] =
        (alchemist_parameter){strdup(name), (alchemist_type)type, strdup(doc),
                              default_value[0] == '\0' ? NULL : strdup(default_value)};
}

void alchemist_f_add_result(struct alchemist_f_library *library, const char *name, int type,
                            const char *doc) {
    alchemist_routine *routine = &library->routines[library->count - 1];
    ((alchemist_result *)routine->results)[alchemist_f_next(&library->results)] =
        (alchemist_result){strdup(name), (alchemist_type)type, strdup(doc)};
}

void alchemist_f_set_close(struct alchemist_f_library *library, void (*close)(void *)) {
    library->library.close = close;
}

const alchemist_library *alchemist_f_described(struct alchemist_f_library *library) {
    return &library->library;
}

/* --- a call --- */

int alchemist_f_rank(const alchemist_call *call) { return call->rank; }
int alchemist_f_size(const alchemist_call *call) { return call->size; }
int alchemist_f_comm(const alchemist_call *call) { return (int)MPI_Comm_c2f(call->comm); }

void *alchemist_f_state(const alchemist_call *call) { return call->state; }
void alchemist_f_set_state(alchemist_call *call, void *state) { call->state = state; }

void *alchemist_f_allocate(alchemist_call *call, size_t bytes) {
    return call->host->allocate(call, bytes);
}

int alchemist_f_fail(alchemist_call *call, int kind, const char *message) {
    return alchemist_error(call, kind, "%s", message);
}

/* kind 0: double, 1: int64_t; operation 1: sum, 2: minimum, 3: maximum. */
int alchemist_f_allreduce(alchemist_call *call, void *values, int count, int kind, int operation) {
    MPI_Datatype type = kind == 0 ? MPI_DOUBLE : MPI_INT64_T;
    MPI_Op op = operation == 1 ? MPI_SUM : operation == 2 ? MPI_MIN : MPI_MAX;
    return alchemist_allreduce(call, values, values, count, type, op);
}

int alchemist_f_exchange(alchemist_call *call, const double *out, int to, double *in, int from,
                         int count) {
    return alchemist_exchange(call, out, to, in, from, count, MPI_DOUBLE);
}
