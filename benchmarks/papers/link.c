/* A link between two hosts, which are network namespaces: a rate and a delay, the same both ways.
 *
 *     link PID PID      processes in the two namespaces; each gets the device `link0`
 *
 * A line on stdin, "BITS_PER_SECOND NANOSECONDS", sets rate (0: unlimited) and delay of one way;
 * the program answers "ready". It ends with its stdin. Packets wait in the device's queue for the
 * link, which loses none of them. (Kernels without netem have no qdisc that delays.)
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 1024, BYTES = 65536 };

/* A packet is taken when the link is free within this time, so that it never runs dry. */
#define AHEAD_NS 500000

typedef struct {
    int64_t due;
    ssize_t length;
    char bytes[BYTES];
} packet;

typedef struct {
    int from, to;
    int64_t free_at; /* the last packet has left the sender */
    unsigned first, end;
    packet *packets;
} way;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

static void check(int holds, const char *what) {
    if (holds) return;
    perror(what);
    exit(1);
}

static int device(const char *pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    check(space >= 0 && setns(space, CLONE_NEWNET) == 0, path);
    close(space);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_name = "link0", .ifr_flags = IFF_TUN | IFF_NO_PI};
    check(fd >= 0 && ioctl(fd, TUNSETIFF, &request) == 0, "/dev/net/tun");
    return fd;
}

int main(int argc, char **argv) {
    check(argc == 3, "two processes");
    int a = device(argv[1]), b = device(argv[2]);
    way ways[2] = {{.from = a, .to = b}, {.from = b, .to = a}};
    for (int i = 0; i < 2; i++) {
        ways[i].packets = calloc(SLOTS, sizeof *ways[i].packets);
        check(ways[i].packets != NULL, "memory");
    }
    prctl(PR_SET_TIMERSLACK, 1);
    double ns_per_byte = 0;
    int64_t delay = 0;
    for (;;) {
        int64_t time = now(), wake = INT64_MAX;
        struct pollfd waiting[3] = {{.fd = 0, .events = POLLIN}};
        for (int i = 0; i < 2; i++) {
            way *w = &ways[i];
            for (; w->first != w->end; w->first++) {
                packet *next = &w->packets[w->first % SLOTS];
                if (next->due > time) {
                    wake = next->due < wake ? next->due : wake;
                    break;
                }
                /* It fails before the other host has set its device up. */
                if (write(w->to, next->bytes, next->length) < 0) continue;
            }
            int64_t takes_at = w->free_at - AHEAD_NS;
            int takes = w->end - w->first < SLOTS && takes_at < time;
            if (takes_at >= time && takes_at < wake) wake = takes_at + 1;
            waiting[i + 1] = (struct pollfd){.fd = takes ? w->from : -1, .events = POLLIN};
        }
        struct timespec left = {.tv_sec = 1};
        if (wake != INT64_MAX) {
            int64_t ns = wake > time ? wake - time : 0;
            left = (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
        }
        check(ppoll(waiting, 3, &left, NULL) >= 0, "poll");
        if (waiting[0].revents) {
            char line[128];
            ssize_t length = read(0, line, sizeof line - 1);
            if (length <= 0) return 0;
            line[length] = 0;
            double rate = 0, ns = 0;
            sscanf(line, "%lf %lf", &rate, &ns);
            ns_per_byte = rate > 0 ? 8e9 / rate : 0;
            delay = (int64_t)ns;
            puts("ready");
            fflush(stdout);
        }
        time = now();
        for (int i = 0; i < 2; i++) {
            way *w = &ways[i];
            if (!waiting[i + 1].revents) continue;
            while (w->end - w->first < SLOTS && w->free_at - AHEAD_NS < time) {
                packet *taken = &w->packets[w->end % SLOTS];
                taken->length = read(w->from, taken->bytes, BYTES);
                if (taken->length <= 0) break;
                if (w->free_at < time) w->free_at = time;
                w->free_at += (int64_t)(taken->length * ns_per_byte);
                taken->due = w->free_at + delay;
                w->end++;
            }
        }
    }
}
