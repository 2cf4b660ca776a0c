/* A layer between MPI and its callers: a wait for another rank ends when its call has ended.
 *
 * `mpi_calls.py` adds the functions MPI_... below. The layer is loaded before MPI with RTLD_GLOBAL, so
 * that Python's, PETSc's and ScaLAPACK's calls arrive here. A call that can wait starts the form that
 * does not, tests it, and reads the node's interrupt word between tests. A test makes progress for
 * every operation under way, as MPI's own wait does.
 *
 * A wait that is left must not let MPI write into memory that its caller has left:
 *   - a receive is cancelled;
 *   - a collective with small elements works on memory of this file, which is then not used again;
 *   - after any other one, and after a wait of native code, which may not look at the error, this
 *     process must not run another call (`unsafe`): Python tells the gang so.
 *
 * MPICH's ABI, without its header, which is not there when wheels are built: handles are 32 bits.
 * They pass through here in 64, so that another MPI's pointers do so too while the layer is off. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef intptr_t H; /* a handle */
typedef struct { int count_lo, count_hi_and_cancelled, source, tag, error; } Status;

enum { COMM_NULL = 0x04000000, REQUEST_NULL = 0x2c000000, COMM_SELF = 0x44000001, COMM_WORLD = 0x44000000,
       BYTE = 0x4c00010d, PACKED = 0x4c00010f, SUM = 0x58000003, ANY_TAG = -1, ANY_SOURCE = -2 };
enum { FIRST_TESTS = 16 }; /* about 1 us: a shorter wait is not shown, nor counted */
enum { LOOKS = 3, TESTS = 64, TESTS_PER_YIELD = 32 * TESTS, YIELDS = 200, SLEEP_NS = 50000 };
enum { SMALL = 16 << 10 }; /* bytes of a collective that are copied, at most */
enum { NAME = @slot };     /* bytes of a call's name, and of a program's seconds */
#define IN_PLACE ((void *)-1)
#define IGNORE ((Status *)1)
#define LONG_S 2e-3   /* of a wait, after which its end may be seen later, by a sleep */
#define SLEEP_SHARE 0.02 /* of the wait so far: how long such a sleep is */
#define GRACE_S 0.2   /* for what is under way between ranks when a wait is left */
#define GRACE_TESTS 500 /* also where this rank had no core meanwhile */
/* Native code that goes on after the end of its call has so many MPI calls, or this time if it computes: if it
 * has a core for more than COMPUTING_S of it. */
enum { MOST_REFUSED = 100, REFUSED = 97 }; /* the exit code */
#define REFUSING_S 1
#define COMPUTING_S 0.1
#define CALLER __builtin_return_address(0)

/* `mpi_layer.State` in Python. */
typedef struct {
/* @state */
} State;
State alchemist_waits;
const char alchemist_waits_version[] = "@version"; /* of the sources */
static State *const state = &alchemist_waits;

static int program; /* of `als.run_program`: its seconds in MPI are behind the name */
static int ready, depth; /* depth: inside of a call that goes to MPI whole */
static void resolve(void);

static double time_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static double now(void) { return time_of(CLOCK_MONOTONIC); }
static int on(void) {
    if (__builtin_expect(!ready, 0)) resolve();
    if (!state->active || depth) return 0;
    state->used = 1;
    return 1;
}
/* A call has begun to wait; NULL: it has ended. */
static void at(const char *name) {
    if (state->waits_in == NULL || depth) return;
    if (name == NULL)
        *state->waits_in = 0;
    else
        strncpy(state->waits_in, name, NAME - 9);
    if (program) *(double *)(state->waits_in + NAME - 8) += name == NULL ? now() : -now();
}
static int over(void) { return state->word != NULL && *state->word >= state->call; }
static int same(H a, H b) { return (int32_t)a == (int32_t)b; }
static int builtin(H handle) { return ((uint32_t)handle >> 30) == 1; }

/* @pointers */

/* --- waiting --- */

typedef struct { unsigned count; long sleep_ns; double begun; } Turns;

/* Where ranks share cores, or the wait lasts: it sleeps, so that the core is free for the rank that is
 * late. Another program may have that rank's core, which no rank sees. */
static void rest(unsigned turn, long sleep_ns) {
    if (state->crowded && turn > YIELDS) sleep_ns = SLEEP_NS;
    if (sleep_ns)
        nanosleep(&(struct timespec){0, sleep_ns}, NULL);
    else if (state->crowded || turn % TESTS_PER_YIELD == 0)
        sched_yield();
}
/* Between two tests: whether to go on. */
static int turn(Turns *turns, const char *name) {
    if (turns->count++ < FIRST_TESTS) return 1;
    if (turns->count == FIRST_TESTS + 1) {
        turns->begun = now();
        at(name);
    }
    if (over()) return 0;
    /* Between nodes, the progress of large messages needs tests without sleeps. */
    if (turns->count % TESTS == 0 || turns->sleep_ns) {
        const double waited_s = now() - turns->begun;
        turns->sleep_ns = state->one_node && waited_s > LONG_S ? (long)(1e9 * SLEEP_SHARE * waited_s) : 0;
        if (turns->sleep_ns > SLEEP_NS) turns->sleep_ns = SLEEP_NS;
    }
    rest(turns->count, turns->sleep_ns);
    return 1;
}
static void stop(const Turns *turns) {
    if (turns->count <= FIRST_TESTS) return;
    state->waited_s += now() - turns->begun;
    at(NULL);
}
/* Test a request for some time more, whatever the word says. Whether it is done. */
static int settled(int32_t *request) {
    int done = 0;
    const double until = now() + GRACE_S;
    for (unsigned i = 0; !p_Test(request, &done, IGNORE) && !done && (i < GRACE_TESTS || now() < until); i++)
        rest(i, 0);
    return done;
}

/* --- communicators --- */

/* Those that may have messages: MPI's own, the gang's, and those that code has made. */
enum { GANG = 1, PRODUCT = 2, ALL_CALLS = 4 }; /* `interruption.Of` */
static struct { int32_t comm; int about; uint64_t used; /* by this call */ } *comms;
static int comm_count;

static int place_of(H comm) {
    int i = 0;
    while (i < comm_count && !same(comms[i].comm, comm)) i++;
    return i;
}
static int about(H comm) {
    const int i = place_of(comm);
    return i < comm_count ? comms[i].about : 0;
}
void alchemist_waits_own(int32_t comm, int what) {
    const int i = place_of(comm);
    if (same(comm, COMM_NULL)) return;
    if (i == comm_count) {
        comms = realloc(comms, (size_t)++comm_count * sizeof *comms);
        if (comms == NULL) abort();
        comms[i].comm = comm, comms[i].about = 0, comms[i].used = 0;
    }
    comms[i].about |= what;
}
static void made(int32_t comm) { alchemist_waits_own(comm, 0); }
/* `together`: the number of a collective call, or 0. The order in which a call of the gang has them is
 * that of all its ranks, unless some have left one out. */
static void use(H comm, unsigned together) {
    static int i; /* the same one as before, most often */
    if (i >= comm_count || !same(comms[i].comm, comm)) i = place_of(comm);
    if (i == comm_count) return;
    comms[i].used = state->call;
    if (together && !(comms[i].about & GANG)) state->sequence = 31 * (state->sequence + together) + (unsigned)i;
}
/* How many communicators without these properties the call has used that still exist. */
int alchemist_waits_used(int properties) {
    int count = 0;
    for (int i = 0; i < comm_count; i++) count += !(comms[i].about & properties) && comms[i].used == state->call;
    return count;
}
static void disown(int32_t comm) {
    const int i = place_of(comm);
    if (i < comm_count) comms[i] = comms[--comm_count];
}
static int end_comm(int32_t *comm, int (*end)(int32_t *)) {
    const int32_t was = *comm;
    if (on() && about(was) & ALL_CALLS) return state->ours;
    const int e = end(comm);
    if (!e) disown(was);
    return e;
}
int MPI_Comm_free(int32_t *comm) { return on(), end_comm(comm, p_Comm_free); }
int MPI_Comm_disconnect(int32_t *comm) { return on(), end_comm(comm, p_Comm_disconnect); }

/* --- operations under way --- */

/* What becomes of one that is given up: a receive is cancelled; what is sent is only read; others may
 * write into their caller's memory, unless that is a copy. */
typedef enum { RECEIVES, SENDS, WRITES, COPIED, GIVEN_UP } Kind;
typedef struct { int32_t request, comm; Kind kind; } Operation;
static Operation *table; /* open addressing; request 0: free */
static unsigned table_size, table_count;

static unsigned slot(int32_t request) {
    unsigned i = (uint32_t)request * 2654435761u & (table_size - 1);
    while (table[i].request != 0 && table[i].request != request) i = (i + 1) & (table_size - 1);
    return i;
}
static void note(int32_t request, H comm, Kind kind) {
    if (2 * (table_count + 1) > table_size) {
        Operation *old = table;
        const unsigned size = table_size;
        table_size = size ? 2 * size : 256;
        table = calloc(table_size, sizeof *table);
        if (table == NULL) abort();
        for (unsigned i = 0; i < size; i++)
            if (old[i].request) table[slot(old[i].request)] = old[i];
        free(old);
    }
    const unsigned i = slot(request);
    table_count += table[i].request == 0;
    table[i] = (Operation){request, (int32_t)comm, kind};
}
/* Its memory stays when it is given up. */
void alchemist_waits_kept(int32_t request) {
    if (table_count && table[slot(request)].request != 0) table[slot(request)].kind = COPIED;
}
static int known(int32_t request) {
    return same(request, REQUEST_NULL) || (table_count && table[slot(request)].request != 0);
}
static void forget(int32_t request) {
    if (table_count == 0 || same(request, REQUEST_NULL)) return;
    const unsigned i = slot(request);
    if (table[i].request == 0) return;
    table[i].request = 0;
    table_count--;
    for (unsigned j = (i + 1) & (table_size - 1); table[j].request != 0; j = (j + 1) & (table_size - 1)) {
        const Operation moved = table[j];
        table[j].request = 0;
        table[slot(moved.request)] = moved;
    }
}
int MPI_Request_free(int32_t *request) {
    if (on()) forget(*request);
    return p_Request_free(request);
}
/* Also false for a persistent one between its MPI_Wait and its next MPI_Start. */
static int under_way(int32_t request) {
    int done = 0;
    return !p_Request_get_status(request, &done, IGNORE) && !done;
}
static void mark_unsafe(const char *why) {
    if (state->unsafe == NULL) state->unsafe = why;
}
/* The wait for an operation is left, or its call has ended without one. */
static void give_up(int32_t request, Kind kind, H comm) {
    if (!(about(comm) & GANG)) mark_unsafe("operations on a communicator that is not the call's own were left");
    if (kind == WRITES) mark_unsafe("an operation was left that can still write into memory");
    if (kind != RECEIVES) return;
    p_Cancel(&request);
    const double until = now() + GRACE_S;
    for (unsigned i = 0; under_way(request); i++) {
        if (i >= GRACE_TESTS && now() > until) {
            mark_unsafe("a receive was left when a part of its message had arrived");
            return;
        }
        rest(i, 0);
    }
}
/* The same for a request of this file, which is freed. */
static void abandon(int32_t *request, Kind kind, H comm) {
    int done;
    if (under_way(*request)) give_up(*request, kind, comm);
    p_Test(request, &done, IGNORE);
}
/* The operations that are under way; how many. */
static int give_up_all(int failed) {
    int count = 0;
    for (unsigned i = 0; i < table_size && table_count > 0; i++) {
        Operation *one = &table[i];
        if (one->request == 0 || one->kind == GIVEN_UP || !under_way(one->request)) continue;
        if (!failed && about(one->comm) & PRODUCT) continue;
        count++;
        /* Of a call that has succeeded, other ranks wait for nothing but a collective. */
        give_up(one->request, one->kind, failed ? one->comm : COMM_SELF);
        if (one->kind == SENDS) one->kind = GIVEN_UP; /* it may never be received */
    }
    return count;
}
/* The call has ended by an error. */
void alchemist_waits_leave(void) { give_up_all(1); }

/* Whether native code has called, and not mpi4py, which raises an exception. */
static int native(const void *caller) {
    Dl_info about;
    return !dladdr(caller, &about) || about.dli_fname == NULL || strstr(about.dli_fname, "/mpi4py/MPI.") == NULL;
}
static void end_process(const char *name) {
    fprintf(stderr, "this rank's process ends: native code goes on after the end of its call, although MPI "
                    "returns an error to it (MPI_%s)\n", name);
    _exit(REFUSED);
}
static pthread_t calling; /* the thread with the call's code */
static volatile int answered;
static int answer(void *_) { return (void)_, answered = 1, 0; }
/* Until the call is over: end native code that computes on without MPI. Python's main thread then does not
 * answer, and has a core. What Python cleans up is left alone. */
static void *watch(void *number) {
    int (*ask)(int (*)(void *), void *);
    clockid_t clock;
    const uint64_t call = (uintptr_t)number;
    *(void **)&ask = dlsym(RTLD_DEFAULT, "Py_AddPendingCall");
    if (ask == NULL || pthread_getcpuclockid(calling, &clock)) return NULL;
    while (state->call == call) {
        const double begun = time_of(clock);
        answered = 0;
        ask(answer, NULL);
        sleep(REFUSING_S);
        if (state->call == call && !answered && time_of(clock) - begun > COMPUTING_S) end_process(state->left_in);
    }
    return NULL;
}
static int refused(const char *name, const void *caller) {
    pthread_t thread;
    if (state->left_in == NULL) {
        alchemist_waits_leave();
        state->left_s = now();
        state->left_in = name;
    }
    if (!native(caller)) return state->ended;
    mark_unsafe("native code has waited in MPI, and may not have looked at the error");
    if (!state->disposable) return state->ended;
    if (++state->refused > MOST_REFUSED) end_process(name);
    calling = pthread_self();
    if (state->refused == 1 && !pthread_create(&thread, NULL, watch, (void *)(uintptr_t)state->call))
        pthread_detach(thread);
    return state->ended;
}
static int left(int32_t *request, Kind kind, H comm, const char *name, const void *caller) {
    abandon(request, kind, comm);
    return refused(name, caller);
}

/* --- calls --- */

static int finish(int32_t *request, Status *status, Kind kind, H comm, const char *name, const void *caller) {
    int e, done = 0;
    Turns turns = {0};
    while (!(e = p_Test(request, &done, status)) && !done)
        if (!turn(&turns, name)) {
            /* What the others have sent may be complete with a few tests more: an error on which all
             * ranks have agreed is then that of each rank. An operation that writes costs the ranks'
             * processes if it is left, and the others may have no core now. */
            const double until = now() + GRACE_S;
            for (unsigned i = 0; (i < GRACE_TESTS || kind == WRITES) && !e && !done && now() < until; i++) {
                sched_yield();
                e = p_Test(request, &done, status);
            }
            if (!e && !done) e = left(request, kind, comm, name, caller);
            break;
        }
    stop(&turns);
    return e;
}
/* A receive and a send. */
static int finish_both(int32_t *request, Status *status, H comm, const char *name, const void *caller) {
    const int e = finish(&request[0], status, RECEIVES, comm, name, caller);
    const int f = e == state->ended ? 0 : finish(&request[1], IGNORE, SENDS, comm, name, caller);
    return e ? e : f;
}

/* Small elements of a collective: MPI works on copies of them, which it may go on with for ever. */
typedef struct {
    const void *in; /* for MPI */
    void *out;
    void *place; /* of the caller, for the bytes of `out` */
    size_t bytes;
    char *memory;
    int all; /* MPI gets nothing but copies */
} Copies;
static char *spare;

/* -1: they cannot be copied. Datatypes that are made may have gaps, which others may write into. */
static long bytes_of(const void *buffer, long n, H type) {
    int size = 0;
    if (buffer == NULL || buffer == IN_PLACE || n == 0) return 0;
    return n < 0 || n > SMALL || !builtin(type) || p_Type_size(type, &size) ? -1 : n * size;
}
static Copies copied(const void *in, long n, H t, void *out, long m, H u, H op, H comm) {
    Copies copies = {.in = in, .out = out};
    const long read = bytes_of(in, n, t), written = bytes_of(out, m, u), begin = (read + 63) & ~63l;
    int inter = 0;
    /* An operation of the caller's own could run when the caller has gone. */
    if (read < 0 || written < 0 || begin + written > SMALL || !builtin(op) ||
        p_Comm_test_inter(comm, &inter) || inter)
        return copies;
    copies.all = 1;
    copies.memory = spare;
    spare = NULL;
    if (copies.memory == NULL && (copies.memory = malloc(SMALL)) == NULL) abort();
    if (read) copies.in = memcpy(copies.memory, in, (size_t)read);
    if (written == 0) return copies;
    copies.place = out;
    copies.bytes = (size_t)written;
    copies.out = memcpy(copies.memory + begin, out, copies.bytes);
    return copies;
}
static void give_back(Copies *copies, int e) {
    if (copies->memory == NULL || e == state->ended) return;
    if (copies->bytes) memcpy(copies->place, copies->out, copies->bytes);
    if (spare == NULL)
        spare = copies->memory;
    else
        free(copies->memory);
}
/* Wait until all ranks of the communicator are in the same call: 0 or an error. */
static int meet(H comm, const char *name, const void *caller) {
    int e, done = 0;
    int32_t request = REQUEST_NULL;
    Turns turns = {0};
    if ((e = p_Ibarrier(comm, &request))) return e;
    while (!(e = p_Test(&request, &done, IGNORE)) && !done)
        if (!turn(&turns, name)) {
            /* Others may know that all have come, and have gone on into MPI's call. */
            if (!settled(&request)) e = left(&request, COPIED, comm, name, caller);
            break;
        }
    stop(&turns);
    return e;
}
static double whole(const char *name) {
    at(name);
    depth++;
    return now();
}
static void end_whole(double begun) {
    depth--;
    at(NULL);
    state->waited_s += now() - begun;
}

/* Communicators on which the ranks of windows and of files meet. */
static struct { H owner; int32_t comm; } *shadows;
static int shadow_count;
static int shadow_of(H owner) {
    int i = 0;
    while (i < shadow_count && shadows[i].owner != owner) i++;
    return i;
}
static H shadow(H owner) {
    const int i = shadow_of(owner);
    return i < shadow_count ? shadows[i].comm : COMM_SELF;
}
static void new_shadow(H owner, H comm) {
    int32_t its;
    if (p_Comm_dup(comm, &its)) return;
    alchemist_waits_own(its, about(comm) & GANG);
    shadows = realloc(shadows, (size_t)(shadow_count + 1) * sizeof *shadows);
    if (shadows == NULL) abort();
    shadows[shadow_count].owner = owner;
    shadows[shadow_count++].comm = its;
}
/* Its window or file is freed without the layer: on some ranks perhaps, so its communicator stays. */
static void forget_shadow(H owner) {
    const int i = shadow_of(owner);
    if (i < shadow_count) shadows[i] = shadows[--shadow_count];
}
static void drop_shadow(H owner) {
    const int i = shadow_of(owner);
    if (i == shadow_count) return;
    disown(shadows[i].comm);
    p_Comm_free(&shadows[i].comm);
    forget_shadow(owner);
}

static int probe(int from, int tag, H c, Status *s, const char *name, const void *caller) {
    int e, done = 0;
    Turns turns = {0};
    while (!(e = p_Iprobe(from, tag, c, &done, s)) && !done)
        if (!turn(&turns, name)) { e = refused(name, caller); break; }
    stop(&turns);
    return e;
}
static int mprobe(int from, int tag, H c, int32_t *m, Status *s, const char *name, const void *caller) {
    int e, done = 0;
    Turns turns = {0};
    while (!(e = p_Improbe(from, tag, c, &done, m, s)) && !done)
        if (!turn(&turns, name)) { e = refused(name, caller); break; }
    stop(&turns);
    return e;
}
static int win_wait(H w, const char *name, const void *caller) {
    int e, done = 0;
    Turns turns = {0};
    while (!(e = p_Win_test(w, &done)) && !done)
        if (!turn(&turns, name)) { e = refused(name, caller); break; }
    stop(&turns);
    return e;
}

/* --- requests --- */

/* One turn of a wait for one request, or of those that test several. */
typedef enum { ALL, ANY, SOME } Which;
typedef struct { Which which; int n; int32_t *requests; int *index, *found; Status *status; } Several;
static int test(const Several *one, int *done, int waits) {
    int e = 0;
    switch (one->which) {
    case ALL: /* Of persistent collectives MPICH's Testall says that they have failed, Waitall does not. */
        if (!waits) return p_Testall(one->n, one->requests, done, one->status);
        *done = 1;
        for (int i = 0; i < one->n && *done; i++)
            if ((e = p_Request_get_status(one->requests[i], done, IGNORE))) return e;
        return *done ? p_Waitall(one->n, one->requests, one->status) : 0;
    case ANY: return p_Testany(one->n, one->requests, one->index, done, one->status);
    case SOME: e = p_Testsome(one->n, one->requests, one->found, one->index, one->status);
    }
    *done = *one->found != 0;
    return e;
}
/* MPI sets the handles of finished requests to REQUEST_NULL: what they were is kept meanwhile. */
static int test_several(const Several *these, int *flag, int waits, const char *name, const void *caller) {
    int32_t few[64], *were = few;
    int e, done = 0;
    Turns turns = {0};
    const size_t bytes = these->n > 0 ? (size_t)these->n * sizeof *were : 0;
    if (bytes > sizeof few && (were = malloc(bytes)) == NULL) abort();
    if (bytes) memcpy(were, these->requests, bytes);
    while (!(e = test(these, &done, waits)) && !done && waits)
        if (!turn(&turns, name)) {
            for (int i = 0; i < these->n; i++)
                if (!known(were[i])) mark_unsafe("a request was left that is not MPI's own");
            e = refused(name, caller);
            break;
        }
    stop(&turns);
    for (int i = 0; i < these->n; i++)
        if (were[i] != these->requests[i]) forget(were[i]);
    if (were != few) free(were);
    if (flag != NULL) *flag = done;
    return e;
}
static int wait(int32_t *r, Status *s, const char *name, const void *caller) {
    int e, done = 0;
    const int32_t was = *r;
    Turns turns = {0};
    while (!(e = p_Test(r, &done, s)) && !done)
        if (!turn(&turns, name)) {
            if (!known(was)) mark_unsafe("a request was left that is not MPI's own");
            e = refused(name, caller);
            break;
        }
    stop(&turns);
    if (*r != was) forget(was);
    return e;
}
static int test_one(int32_t *r, int *flag, Status *s) {
    const int32_t was = *r;
    const int e = p_Test(r, flag, s);
    if (*r != was) forget(was);
    return e;
}

int MPI_Buffer_attach(void *buffer, int size) { return on(), state->attached = 1, p_Buffer_attach(buffer, size); }
int MPI_Buffer_attach_c(void *buffer, long size) { return on(), state->attached = 1, p_Buffer_attach_c(buffer, size); }
int MPI_Buffer_detach(void *buffer, void *size) { return on(), state->attached = 0, p_Buffer_detach(buffer, size); }
int MPI_Buffer_detach_c(void *buffer, void *size) { return on(), state->attached = 0, p_Buffer_detach_c(buffer, size); }

/* @functions */

/* --- between calls --- */

/* Receive and drop the messages that no one has received. */
static void drop_messages(int32_t comm) {
    for (;;) {
        Status status;
        int32_t message, request;
        int found = 0, bytes = 0;
        /* The first look may only have MPI fetch what has arrived. */
        for (int i = 0; i < LOOKS && !found; i++)
            if (p_Improbe(ANY_SOURCE, ANY_TAG, comm, &found, &message, &status)) return;
        if (!found) return;
        state->messages++;
        state->source = status.source, state->tag = status.tag;
        char *memory = p_Get_count(&status, BYTE, &bytes) || bytes < 0 ? NULL : malloc((size_t)bytes + 1);
        if (memory == NULL || p_Imrecv(memory, bytes, BYTE, &message, &request) || !settled(&request)) {
            mark_unsafe("a message was left that cannot be received"); /* it may be written yet */
            return;
        }
        free(memory);
    }
}
/* Before a call: what the earlier one has left may have arrived since its end. */
void alchemist_waits_drop(void) {
    for (int i = 0; i < comm_count; i++)
        if (!(comms[i].about & PRODUCT)) drop_messages(comms[i].comm);
}
/* After a call that has succeeded. A receive leaves nothing on its communicator, nor a message, which
 * the other rank drops. */
void alchemist_waits_end(void) {
    state->requests += give_up_all(0);
    alchemist_waits_drop();
}

/* --- the layer --- */

typedef struct { const char *name; void **place; } Symbol;
static const Symbol symbols[] = {
/* @symbols */
    {0}};
static void *mpi; /* the library */
static int find(struct dl_phdr_info *about, size_t size, void *_) {
    (void)size, (void)_;
    const char *name = strrchr(about->dlpi_name, '/');
    if (name == NULL || strncmp(name, "/libmpi", 7)) return 0;
    void *opened = dlopen(about->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (opened == NULL || dlsym(opened, "PMPI_Testall") == NULL) return 0;
    mpi = opened;
    return 1;
}
static void resolve(void) {
    dl_iterate_phdr(find, NULL);
    for (const Symbol *one = symbols; one->name != NULL; one++)
        *one->place = dlsym(mpi ? mpi : RTLD_DEFAULT, one->name);
    ready = 1;
}
static int add_error(int32_t *code, const char *text) {
    int class;
    return p_Add_error_class(&class) || p_Add_error_code(class, code) || p_Add_error_string(*code, (void *)text);
}
/* A program of `als.run_program`, in which the layer is off, shows its rank in which call it is. */
__attribute__((constructor)) static void show(void) {
    const char *where = getenv("ALCHEMIST_WAITS_IN"); /* "128 of /file" */
    long offset;
    char path[4096];
    if (where == NULL || sscanf(where, "%ld of %4095[^\n]", &offset, path) != 2) return;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    char *page = mmap(NULL, (size_t)offset + NAME, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) {
        state->waits_in = page + offset;
        program = 1;
    }
    close(file);
}
/* Make the errors that waits return. 0, or an error of MPI's. */
int alchemist_waits_start(void) {
    if (!ready) resolve();
    made(COMM_WORLD);
    alchemist_waits_own(COMM_SELF, GANG);
    return !state->ended &&
           (add_error(&state->ended, "the call has ended: it failed on another rank, or was cancelled") ||
            add_error(&state->ours, "this is the gang's own communicator, which later calls need: free only "
                                    "communicators that you have made (comm.Dup(), comm.Split())"));
}
