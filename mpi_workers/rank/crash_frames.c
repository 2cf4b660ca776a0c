/* The C frames of a crash, written to a file before Python writes its own (faulthandler).
 *
 * Built together with the copy kernel; without it crashes show Python frames only. The handler
 * calls what is safe in one: backtrace (loaded beforehand), write, sigaction, raise. */

#define _GNU_SOURCE
#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#define FRAMES 32

static const int crashes[] = {SIGSEGV, SIGABRT, SIGFPE, SIGILL};
static struct sigaction earlier[NSIG];
static int target = -1;

static void show(int number, siginfo_t *about, void *context) {
    static const char head[] = "C frames\n";
    void *frames[FRAMES];
    int count = backtrace(frames, FRAMES);
    (void)about, (void)context;
    if (write(target, head, sizeof head - 1) > 0)
        backtrace_symbols_fd(frames, count, target);
    /* Blocked until we return: then Python's handler is the one. */
    sigaction(number, &earlier[number], NULL);
    raise(number);
}

/* Write the frames of later crashes to a file descriptor. Returns 0, or -1 as sigaction does. */
int alchemist_show_crashes(int descriptor) {
    struct sigaction ours = {.sa_sigaction = show, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    void *first[1];
    backtrace(first, 1); /* loads what it needs */
    target = descriptor;
    for (unsigned i = 0; i < sizeof crashes / sizeof *crashes; i++)
        if (sigaction(crashes[i], &ours, &earlier[crashes[i]]))
            return -1;
    return 0;
}
