/* Exchanges of a field: between calls of two gangs, and between the two ranks of one gang. */
#include <alchemist.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of an exchange: both sides send first, then receive. */
static int exchange(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    const int64_t count = in[1].integer;
    alchemist_matrix *mine = alchemist_new_vector(call, in[0].integer, ALCHEMIST_FLOAT64,
                                                  ALCHEMIST_VC_STAR);
    alchemist_matrix *theirs = alchemist_new_like(call, mine);
    double *there = theirs->data, *here = mine->data, begun = 0;
    int code;
    for (int64_t k = -1; k < count; k++) { /* the first one meets */
        if (k == 0) begun = now();
        for (int64_t i = 0; i < mine->local_rows; i++) here[i] = (double)k;
        if ((code = alchemist_channel_send(call, "interface", mine))) return code;
        if ((code = alchemist_channel_receive(call, "interface", theirs))) return code;
        for (int64_t i = 0; i < mine->local_rows; i++)
            if (there[i] != (double)k) return alchemist_fail(call, "%g instead of %d", there[i], (int)k);
    }
    out[0].number = (now() - begun) / (double)count;
    return ALCHEMIST_OK;
}

/* The same by MPI_Sendrecv between ranks 0 and 1. */
static int sendrecv(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    const int64_t n = in[0].integer, count = in[1].integer;
    double *here = call->host->allocate(call, (size_t)n * 8), begun = 0;
    double *there = call->host->allocate(call, (size_t)n * 8);
    for (int64_t k = -1; k < count; k++) {
        if (k == 0) begun = now();
        for (int64_t i = 0; i < n; i++) here[i] = (double)k;
        const int code = MPI_Sendrecv(here, (int)n, MPI_DOUBLE, 1 - call->rank, 0, there, (int)n,
                                      MPI_DOUBLE, 1 - call->rank, 0, call->comm, MPI_STATUS_IGNORE);
        if (code) return alchemist_returned(call, code, "MPI_Sendrecv");
        for (int64_t i = 0; i < n; i++)
            if (there[i] != (double)k) return alchemist_fail(call, "%g instead of %d", there[i], (int)k);
    }
    out[0].number = (now() - begun) / (double)count;
    return ALCHEMIST_OK;
}

#define PARAMETERS ALCHEMIST_PARAMETERS({"n", ALCHEMIST_INT, "doubles", NULL}, {"count", ALCHEMIST_INT, "exchanges", NULL})
#define SECONDS ALCHEMIST_RESULTS({"seconds", ALCHEMIST_FLOAT, "of an exchange"})
static const alchemist_routine routines[] = {
    {"exchange", "Exchange a vector of n doubles with another gang.", exchange, PARAMETERS, SECONDS},
    {"sendrecv", "The same between two ranks of a gang.", sendrecv, PARAMETERS, SECONDS},
    {0},
};
ALCHEMIST_LIBRARY("gangs", "Exchanges of a field.", routines)
