/* A library in C whose state can be saved: a counter. */
#include "alchemist.h"

static int add(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    if (call->state == NULL) call->state = calloc(1, sizeof(int64_t));
    out[0].integer = *(int64_t *)call->state += in[0].integer;
    return ALCHEMIST_OK;
}

static int save_state(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in;
    out[0].integer = call->state == NULL ? 0 : *(int64_t *)call->state;
    return ALCHEMIST_OK;
}

static int load_state(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)out;
    if (call->state == NULL) call->state = calloc(1, sizeof(int64_t));
    *(int64_t *)call->state = in[0].integer;
    return ALCHEMIST_OK;
}

static const alchemist_routine routines[] = {
    {.name = "add", .doc = "Add to the counter.", .run = add,
     .parameters = ALCHEMIST_PARAMETERS({"by", ALCHEMIST_INT, "how much", "1"}),
     .results = ALCHEMIST_RESULTS({"total", ALCHEMIST_INT, "the counter"})},
    {.name = "save_state", .doc = "The counter.", .run = save_state,
     .results = ALCHEMIST_RESULTS({"total", ALCHEMIST_INT, "the counter"})},
    {.name = "load_state", .doc = "Set the counter.", .run = load_state,
     .parameters = ALCHEMIST_PARAMETERS({"total", ALCHEMIST_INT, "the counter"})},
    {0}};

ALCHEMIST_LIBRARY_CLOSED("counting", "A counter.", routines, free)
