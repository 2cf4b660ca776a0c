/* A simulator whose step does nothing (or sleeps) but fill its observation: the rest is overhead. */
#include <alchemist.h>
#include <stdio.h>
#include <unistd.h>

typedef struct {
    int64_t size, sleep_us;
    double score;
    double state[];
} idle;

#define ROUTINE(name) \
    static int name(alchemist_call *call, const alchemist_value *in, alchemist_value *out)

ROUTINE(setup) {
    (void)out;
    const int64_t size = in[0].integer;
    free(call->state);
    idle *made = calloc(1, sizeof(idle) + (size_t)size * sizeof(double));
    call->state = made;
    if (made == NULL) return alchemist_fail(call, "not enough memory");
    made->size = size;
    made->sleep_us = in[1].integer;
    return ALCHEMIST_OK;
}

ROUTINE(spec) {
    (void)in;
    const idle *self = call->state;
    char *text = call->host->allocate(call, 100);
    if (text == NULL) return ALCHEMIST_FAILED;
    snprintf(text, 100, "{\"observation\": {\"shape\": [%lld]}, \"action\": {\"shape\": [4]}}",
             (long long)self->size);
    out[0].string = text;
    return ALCHEMIST_OK;
}

ROUTINE(reset) {
    (void)in, (void)out;
    idle *self = call->state;
    memset(self->state, 0, (size_t)self->size * sizeof(double));
    return ALCHEMIST_OK;
}

ROUTINE(step) {
    (void)out;
    idle *self = call->state;
    if (self->sleep_us > 0) usleep((useconds_t)self->sleep_us);
    for (int64_t i = 0; i < 16 && i < self->size; i++) self->state[i] += in[0].numbers[i % 4];
    return ALCHEMIST_OK;
}

ROUTINE(get_state) {
    (void)in;
    idle *self = call->state;
    out[0].numbers = self->state;
    out[0].count = self->size;
    return ALCHEMIST_OK;
}

ROUTINE(get_score) {
    (void)in;
    idle *self = call->state;
    out[0].numbers = &self->score;
    out[0].count = 1;
    return ALCHEMIST_OK;
}

static const alchemist_routine routines[] = {
    {"setup", "Setup.", setup,
     ALCHEMIST_PARAMETERS({"size", ALCHEMIST_INT, "numbers of an observation", "16"},
                          {"sleep_us", ALCHEMIST_INT, "microseconds of a step", "0"}), NULL},
    {"spec", "Spec.", spec, NULL, ALCHEMIST_RESULTS({"spec", ALCHEMIST_STRING, "JSON"})},
    {"reset", "Reset.", reset, NULL, NULL},
    {"step", "Step.", step, ALCHEMIST_PARAMETERS({"action", ALCHEMIST_FLOATS, "4", NULL}), NULL},
    {"get_state", "State.", get_state, NULL, ALCHEMIST_RESULTS({"x", ALCHEMIST_FLOATS, "size"})},
    {"get_score", "Score.", get_score, NULL, ALCHEMIST_RESULTS({"r", ALCHEMIST_FLOATS, "1"})},
    {0}};

ALCHEMIST_LIBRARY_CLOSED("idle", "Does nothing.", routines, free)
