/* Faults in C: of the last rank, while the others wait for it in MPI. */
#include <alchemist.h>
#include <signal.h>
#include <unistd.h>

static void spend(void) { /* until the kernel's OOM killer comes */
    for (;;) memset(malloc(1 << 24), 1, 1 << 24);
}
static int fault(const char *how, MPI_Comm c) {
    double x;
    if (!strcmp(how, "SIGSEGV")) *(volatile int *)8 = 1;
    if (!strcmp(how, "SIGKILL")) kill(getpid(), SIGKILL);
    if (!strcmp(how, "exit(3)")) exit(3);
    if (!strcmp(how, "exit(0)")) exit(0);
    if (!strcmp(how, "MPI_Abort")) MPI_Abort(c, 7);
    if (!strcmp(how, "OOM")) spend();
    if (!strcmp(how, "deadlock")) return MPI_Recv(&x, 1, MPI_DOUBLE, MPI_ANY_SOURCE, 9, c, MPI_STATUS_IGNORE);
    return ALCHEMIST_FAILED;
}
static int sum(alchemist_call *call, const alchemist_value *in, alchemist_value *out, MPI_Comm c) {
    const char *how = in[1].string;
    double x = 1, y = -7;
    if (strcmp(how, "") && call->rank == call->size - 1) {
        int code = fault(how, c);
        if (!strcmp(how, "error")) return alchemist_fail(call, "the first cause");
        return code;
    }
    MPI_Allreduce(&x, &y, 1, MPI_DOUBLE, MPI_SUM, c); /* it does not look at the error */
    out[0].number = y;
    return ALCHEMIST_OK;
}
static int of_call(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    return sum(call, in, out, call->comm);
}
/* On a duplicate of the world that it keeps. */
static int of_kept(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    static MPI_Comm kept;
    static int made;
    if (!made) MPI_Comm_dup(MPI_COMM_WORLD, &kept), made = 1;
    return sum(call, in, out, kept);
}
static const alchemist_parameter parameters[] = {
    {"A", ALCHEMIST_MATRIX, "undeclared"}, {"how", ALCHEMIST_STRING, "the fault", "\"\""}, {0}};
static const alchemist_result results[] = {{"total", ALCHEMIST_FLOAT, "of ones"}, {0}};
static const alchemist_routine routines[] = {
    {.name = "plain", .doc = "Sum.", .run = of_call, .parameters = parameters, .results = results},
    {.name = "kept", .doc = "Sum.", .run = of_kept, .parameters = parameters, .results = results},
    {0}};
ALCHEMIST_LIBRARY("causes", "Faults.", routines)
