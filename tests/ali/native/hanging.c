#include <alchemist.h>
#include <unistd.h>
__attribute__((noinline)) int sulk(void) { for (;;) sleep(60); return 0; }
static int meet(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in, (void)out;
    if (call->rank == 1) return sulk();
    MPI_Barrier(call->comm);
    return ALCHEMIST_OK;
}
static const alchemist_routine routines[] = {{.name = "meet", .doc = "Hangs.", .run = meet}, {0}};
ALCHEMIST_LIBRARY("hanging", "Hangs.", routines)
