/* setup, which says what is simulated, and spec, which says what that is like. */
#include "library.h"

#include <math.h>

/* The parameters, in their order. */
enum {
    HEIGHT, WIDTH, RAYLEIGH, PRANDTL, VELOCITY, HEATERS, AMPLITUDE, AGENTS, PROBE_ROWS,
    EPISODE_LENGTH, TIME_STEP, SPIN_UP, ROLL_PAIRS, PERTURBATION, DISTURBANCE, REFERENCE
};

static int refuse_number(alchemist_call *call, const char *name, double is, const char *range) {
    return alchemist_refuse(call, "%s must be %s, and is %g", name, range, is);
}

/* Whether all can be simulated; every rank sees the same arguments and says the same. */
static int check_setup(alchemist_call *call, const cell *is, const task *has) {
    const struct { const char *name; double is; int good; const char *range; } rules[] = {
        {"height", (double)is->height, is->height >= 4 && is->height <= 1 << 16, "4 to 65536"},
        {"width", (double)is->width, is->width >= 4 && is->width <= 1 << 20, "4 to 1048576"},
        {"rayleigh", is->rayleigh, is->rayleigh > 0 && isfinite(is->rayleigh), "above 0"},
        {"prandtl", is->prandtl, is->prandtl > 0 && isfinite(is->prandtl), "above 0"},
        {"velocity", is->velocity, is->velocity > 0 && is->velocity <= 0.3, "in (0, 0.3]"},
        {"heaters", (double)has->heaters, has->heaters >= 1 && has->heaters <= is->width,
         "1 to width"},
        {"amplitude", has->amplitude, has->amplitude >= 0 && has->amplitude <= 2, "0 to 2"},
        {"agents", (double)has->agents, has->agents == 1 || has->agents == has->heaters,
         "1, or one for each heater"},
        {"probe_rows", (double)has->probe_rows,
         has->probe_rows >= 1 && has->probe_rows <= is->height, "1 to height"},
        {"episode_length", (double)has->episode_length, has->episode_length >= 1, "1 or more"},
        {"time_step", has->time_step, has->time_step > 0 && has->time_step <= 1e6,
         "above 0, in free-fall times"},
        {"spin_up", has->spin_up, has->spin_up >= 0 && has->spin_up <= 1e6,
         "0 or more free-fall times"},
        {"roll_pairs", (double)has->roll_pairs,
         has->roll_pairs >= 0 && has->roll_pairs <= is->width / 2, "0 to width / 2"},
        {"perturbation", has->perturbation, fabs(has->perturbation) <= 1, "-1 to 1"},
        {"disturbance", has->disturbance, fabs(has->disturbance) <= 1, "-1 to 1"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (!rules[i].good)
            return refuse_number(call, rules[i].name, rules[i].is, rules[i].range);
    if (is->width < call->size)
        return alchemist_refuse(call, "%lld columns cannot be spread over %d ranks",
                                (long long)is->width, call->size);
    return ALCHEMIST_OK;
}

/* As many pairs of rolls as have about the critical wavelength, 2.016 heights. */
static int64_t natural_pairs(const cell *is) {
    int64_t pairs = llround((double)is->width / (2.016 * (double)is->height));
    return pairs < 1 ? 1 : pairs;
}

ROUTINE(routine_setup) {
    (void)out;
    const cell is = {.height = in[HEIGHT].integer, .width = in[WIDTH].integer,
                     .rayleigh = in[RAYLEIGH].number, .prandtl = in[PRANDTL].number,
                     .velocity = in[VELOCITY].number};
    task has = {.heaters = in[HEATERS].integer, .amplitude = in[AMPLITUDE].number,
                .agents = in[AGENTS].integer, .probe_rows = in[PROBE_ROWS].integer,
                .episode_length = in[EPISODE_LENGTH].integer,
                .time_step = in[TIME_STEP].number, .spin_up = in[SPIN_UP].number,
                .roll_pairs = in[ROLL_PAIRS].given ? in[ROLL_PAIRS].integer : 0,
                .perturbation = in[PERTURBATION].number, .disturbance = in[DISTURBANCE].number};
    int code = check_setup(call, &is, &has);
    if (code) return code;
    if (!in[ROLL_PAIRS].given) has.roll_pairs = natural_pairs(&is);
    simulation *made;
    code = simulation_new(call, &is, &has, in[REFERENCE].given ? in[REFERENCE].number : NAN,
                          &made);
    if (code != ALCHEMIST_OK) return code;
    simulation_free(call->state);
    call->state = made;
    return ALCHEMIST_OK;
}

/* --- spec --- */

ROUTINE(routine_spec) {
    (void)in;
    const simulation *S = simulated(call);
    if (S == NULL) return ALCHEMIST_FAILED;
    const task *has = &S->has;
    const long long seen = (long long)(3 * has->probe_rows * has->heaters);
    char observed[64], acted[64], local[64];
    size_t room = 1200 + 40 * (size_t)has->heaters;
    char *text = call->host->allocate(call, room);
    if (text == NULL) return ALCHEMIST_FAILED;
    if (has->agents == 1) {
        snprintf(observed, sizeof observed, "%lld", seen);
        snprintf(acted, sizeof acted, "%lld", (long long)has->heaters);
    } else {
        snprintf(observed, sizeof observed, "%lld, %lld", (long long)has->agents, seen);
        snprintf(acted, sizeof acted, "%lld, 1", (long long)has->agents);
    }
    size_t length = (size_t)snprintf(
        text, room,
        "{\"name\": \"rayleigh_benard\", "
        "\"observation\": {\"shape\": [%s], \"dtype\": \"float32\", \"low\": %.1f, \"high\": %.1f}, "
        "\"action\": {\"shape\": [%s], \"dtype\": \"float32\", \"low\": -1.0, \"high\": 1.0}, "
        "\"agents\": %lld, \"episode_length\": %lld, \"time_step\": %.17g, "
        "\"score\": \"%s\", "
        "\"render\": {\"field\": \"temperature\", \"low\": -0.5, "
        "\"high\": %.17g}, "
        "\"info\": [\"nusselt\", \"nusselt_bottom\", \"nusselt_top\", \"kinetic_energy\"",
        observed, -OBSERVABLE, OBSERVABLE, acted, (long long)has->agents, (long long)has->episode_length,
        (double)S->substeps * S->L->is.velocity / (double)S->L->is.height,
        has->agents == 1 ? "reference - nusselt"
                         : "0.8 (reference - nusselt) + 0.2 (reference - nusselt above the heater "
                           "and the two beside it) / 4",
        HOT + has->amplitude);
    for (int64_t j = 0; j < has->heaters; j++) {
        snprintf(local, sizeof local, ", \"nusselt_above_%lld\"", (long long)j);
        length += (size_t)snprintf(text + length, room - length, "%s", local);
    }
    snprintf(text + length, room - length, "]}");
    out[0].string = text;
    return ALCHEMIST_OK;
}
