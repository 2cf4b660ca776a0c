/* A library for tests: it sends to a rank that does not exist. */
#include <alchemist.h>

static int careless(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in, (void)out;
    MPI_Send(NULL, 0, MPI_BYTE, 12345, 0, call->comm);
    return ALCHEMIST_OK;
}

static int careful(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in;
    MPI_Comm_set_errhandler(call->comm, MPI_ERRORS_RETURN);
    out[0].integer = MPI_Send(NULL, 0, MPI_BYTE, 12345, 0, call->comm) != MPI_SUCCESS;
    return ALCHEMIST_OK;
}

static const alchemist_routine routines[] = {
    {.name = "careless", .doc = "Ignores the error.", .run = careless},
    {.name = "careful", .doc = "Handles the error.", .run = careful,
     .results = ALCHEMIST_RESULTS({"failed", ALCHEMIST_INT, "1: MPI_Send has failed"})},
    {0}};

ALCHEMIST_LIBRARY("mpi_errors", "Errors of MPI.", routines)
