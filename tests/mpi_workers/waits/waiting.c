/* Waits in MPI for rank 1, which does not take part: in C, in Fortran and in BLACS. */
#include <alchemist.h>
#include <signal.h>
#include <unistd.h>

int waited_in_fortran(const char *how, int length, MPI_Comm, int size); /* waiting.f90 */

#ifdef WITH_BLACS
int Csys2blacs_handle(MPI_Comm);
void Cblacs_gridinit(int *, const char *, int, int);
static int grid;
void Cdgsum2d(int, const char *, const char *, int, int, double *, int, int, int);
#endif

/* Loops that test until something has happened. `ignores`: they do not look at the error. */
static int polled(const char *how, MPI_Comm c, int ignores) {
    double x[2];
    int flag = 0, code = 0, index, count = 0;
    MPI_Request r[2];
    MPI_Message m;
    for (int i = 0; i < 2; i++) MPI_Irecv(x + i, 1, MPI_DOUBLE, 1, 5 + i, c, r + i);
    while (!flag && !count && (ignores || !code)) {
        if (!strcmp(how, "Iprobe")) code = MPI_Iprobe(1, 0, c, &flag, MPI_STATUS_IGNORE);
        else if (!strcmp(how, "Improbe")) code = MPI_Improbe(1, 0, c, &flag, &m, MPI_STATUS_IGNORE);
        else if (!strcmp(how, "Get_status")) code = MPI_Request_get_status(r[0], &flag, MPI_STATUS_IGNORE);
        else if (!strcmp(how, "Test")) code = MPI_Test(r, &flag, MPI_STATUS_IGNORE);
        else if (!strcmp(how, "Testall")) code = MPI_Testall(2, r, &flag, MPI_STATUSES_IGNORE);
        else if (!strcmp(how, "Testany")) code = MPI_Testany(2, r, &index, &flag, MPI_STATUS_IGNORE);
        else if (!strcmp(how, "Testsome")) {
            int found[2];
            code = MPI_Testsome(2, r, &count, found, MPI_STATUSES_IGNORE);
        } else return MPI_ERR_OTHER;
    }
    return code;
}
static int waited(const char *how, MPI_Comm c, int size) {
    double x[64] = {0}, y[64] = {0};
    int counts[64], places[64], index;
    MPI_Request r[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    if (!strncmp(how, "poll ", 5)) return polled(how + 5, c, 0);
    if (!strncmp(how, "ignore ", 7)) return polled(how + 7, c, 1);
    for (int i = 0; i < size; i++) counts[i] = 1, places[i] = i;
    if (!strcmp(how, "Allreduce")) return MPI_Allreduce(x, y, 3, MPI_DOUBLE, MPI_SUM, c);
    if (!strcmp(how, "Allreduce_c")) return MPI_Allreduce_c(x, y, 3, MPI_DOUBLE, MPI_SUM, c);
    if (!strcmp(how, "Bcast")) return MPI_Bcast(x, 3, MPI_DOUBLE, 1, c);
    if (!strcmp(how, "Barrier")) return MPI_Barrier(c);
    if (!strcmp(how, "Recv")) return MPI_Recv(x, 3, MPI_DOUBLE, 1, 0, c, MPI_STATUS_IGNORE);
    if (!strcmp(how, "Probe")) return MPI_Probe(1, 0, c, MPI_STATUS_IGNORE);
    if (!strcmp(how, "Alltoallv"))
        return MPI_Alltoallv(x, counts, places, MPI_DOUBLE, y, counts, places, MPI_DOUBLE, c);
    if (!strcmp(how, "Win_fence")) {
        MPI_Win w; /* its creation waits */
        return MPI_Win_create(x, 8, 8, MPI_INFO_NULL, c, &w) || MPI_Win_fence(0, w);
    }
#ifdef WITH_BLACS
    if (!strcmp(how, "dgsum2d")) return Cdgsum2d(grid, "All", " ", 1, 1, x, 1, -1, -1), 0;
#endif
    for (int i = 0; i < 2; i++) MPI_Irecv(x + i, 1, MPI_DOUBLE, 1, i, c, r + i);
    if (!strcmp(how, "Wait")) return MPI_Wait(r, MPI_STATUS_IGNORE);
    if (!strcmp(how, "Waitany")) return MPI_Waitany(2, r, &index, MPI_STATUS_IGNORE);
    return MPI_Waitall(2, r, MPI_STATUSES_IGNORE);
}

static int fault(alchemist_call *call, const char *what) {
    if (!strcmp(what, "exit")) _exit(3);
    if (!strcmp(what, "SIGSEGV")) raise(SIGSEGV);
    if (!strcmp(what, "error")) return alchemist_fail(call, "rank 1 does not take part");
    for (;;) {
        int code = alchemist_check(call);
        if (code != ALCHEMIST_OK) return code;
        usleep(1000);
    }
}

/* With `careless` errors are fatal on a communicator of our own, and ignored where they are not. */
static int run(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    MPI_Comm c = call->comm;
    (void)out;
    if (in[1].flag) {
        MPI_Comm_dup(call->comm, &c);
        MPI_Comm_set_errhandler(c, MPI_ERRORS_ARE_FATAL);
    }
#ifdef WITH_BLACS
    if (!strcmp(in[0].string, "dgsum2d")) {
        grid = Csys2blacs_handle(c);
        Cblacs_gridinit(&grid, "C", call->size, 1);
    }
#endif
    if (call->rank == 1) return fault(call, in[2].string);
    int code;
#ifdef WITH_FORTRAN
    if (in[3].flag) code = waited_in_fortran(in[0].string, (int)strlen(in[0].string), c, call->size);
    else
#endif
    code = waited(in[0].string, c, call->size);
    if (in[1].flag) return ALCHEMIST_OK;
    return alchemist_returned(call, code, in[0].string);
}
/* All ranks wait for a message that no one sends. */
static int hang(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    double x;
    (void)in, (void)out;
    return MPI_Recv(&x, 1, MPI_DOUBLE, MPI_ANY_SOURCE, 9, call->comm, MPI_STATUS_IGNORE);
}
/* Write a matrix, and wait for ever before its last element. */
static int write_in_place(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    double *data = (double *)in[0].matrix->data;
    const int64_t n = in[0].matrix->local_rows * in[0].matrix->local_cols;
    for (int64_t i = 0; i < n - 1; i++) data[i] = 7;
    if (in[1].flag && hang(call, in, out)) return ALCHEMIST_FAILED;
    if (n > 0) data[n - 1] = 7;
    return ALCHEMIST_OK;
}
static const alchemist_routine routines[] = {
    {.name = "wait", .doc = "Wait.", .run = run,
     .parameters = ALCHEMIST_PARAMETERS({"how", ALCHEMIST_STRING, "which call"},
                                        {"careless", ALCHEMIST_BOOL, "about errors", "false"},
                                        {"fault", ALCHEMIST_STRING, "of rank 1", "\"error\""},
                                        {"fortran", ALCHEMIST_BOOL, "wait in it", "false"})},
    {.name = "write", .doc = "Write.", .run = write_in_place,
     .parameters = ALCHEMIST_PARAMETERS({"A", ALCHEMIST_MATRIX_WRITTEN, "in place"},
                                        {"wait", ALCHEMIST_BOOL, "for ever", "true"})},
    {.name = "hang", .doc = "Wait for ever.", .run = hang},
    {0}};
ALCHEMIST_LIBRARY("waiting", "Waits.", routines)
