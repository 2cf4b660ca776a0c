/* The routines setup (checks the parameters, builds the simulation) and spec (describes it). */
#include <math.h>

#include "simulation.h"

/* The parameters, in their order. */
enum {
    HEIGHT, WIDTH, RAYLEIGH, PRANDTL, VELOCITY, HEATERS, AMPLITUDE, AGENTS, PROBE_ROWS,
    EPISODE_LENGTH, TIME_STEP, SPIN_UP, ROLL_PAIRS, PERTURBATION, DISTURBANCE, REFERENCE
};

/* Check the parameters. All ranks get the same arguments and return the same code. */
static int check_setup(alchemist_call *call, const cell_parameters *cell,
                       const task_parameters *task) {
    const struct { const char *name; double value; int valid; const char *range; } rules[] = {
        {"height", (double)cell->height, cell->height >= 4 && cell->height <= 1 << 16, "4 to 65536"},
        {"width", (double)cell->width, cell->width >= 4 && cell->width <= 1 << 20, "4 to 1048576"},
        {"rayleigh", cell->rayleigh, cell->rayleigh > 0 && isfinite(cell->rayleigh), "above 0"},
        {"prandtl", cell->prandtl, cell->prandtl > 0 && isfinite(cell->prandtl), "above 0"},
        {"velocity", cell->velocity, cell->velocity > 0 && cell->velocity <= 0.3, "in (0, 0.3]"},
        {"heaters", (double)task->heaters, task->heaters >= 1 && task->heaters <= cell->width,
         "1 to width"},
        {"amplitude", task->amplitude, task->amplitude >= 0 && task->amplitude <= 2, "0 to 2"},
        {"agents", (double)task->agents, task->agents == 1 || task->agents == task->heaters,
         "1, or equal to heaters"},
        {"probe_rows", (double)task->probe_rows,
         task->probe_rows >= 1 && task->probe_rows <= cell->height, "1 to height"},
        {"episode_length", (double)task->episode_length, task->episode_length >= 1, "1 or more"},
        {"time_step", task->time_step, task->time_step > 0 && task->time_step <= 1e6,
         "above 0, in free-fall times"},
        {"spin_up", task->spin_up, task->spin_up >= 0 && task->spin_up <= 1e6,
         "0 or more free-fall times"},
        {"roll_pairs", (double)task->roll_pairs,
         task->roll_pairs >= 0 && task->roll_pairs <= cell->width / 2, "0 to width / 2"},
        {"perturbation", task->perturbation, fabs(task->perturbation) <= 1, "-1 to 1"},
        {"disturbance", task->disturbance, fabs(task->disturbance) <= 1, "-1 to 1"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (!rules[i].valid)
            return alchemist_refuse(call, "%s must be %s, not %g", rules[i].name, rules[i].range,
                                    rules[i].value);
    if (cell->width < call->size)
        return alchemist_refuse(call, "%lld columns cannot be distributed over %d ranks",
                                (long long)cell->width, call->size);
    return ALCHEMIST_OK;
}

/* The number of pairs of rolls closest to the critical wavelength, 2.016 heights. */
static int64_t natural_pairs(const cell_parameters *cell) {
    int64_t pairs = llround((double)cell->width / (2.016 * (double)cell->height));
    return pairs < 1 ? 1 : pairs;
}

ROUTINE(routine_setup) {
    (void)out;
    const cell_parameters cell = {.height = in[HEIGHT].integer, .width = in[WIDTH].integer,
                     .rayleigh = in[RAYLEIGH].number, .prandtl = in[PRANDTL].number,
                     .velocity = in[VELOCITY].number};
    task_parameters task = {.heaters = in[HEATERS].integer, .amplitude = in[AMPLITUDE].number,
                .agents = in[AGENTS].integer, .probe_rows = in[PROBE_ROWS].integer,
                .episode_length = in[EPISODE_LENGTH].integer,
                .time_step = in[TIME_STEP].number, .spin_up = in[SPIN_UP].number,
                .roll_pairs = in[ROLL_PAIRS].given ? in[ROLL_PAIRS].integer : 0,
                .perturbation = in[PERTURBATION].number, .disturbance = in[DISTURBANCE].number};
    int code = check_setup(call, &cell, &task);
    if (code) return code;
    if (!in[ROLL_PAIRS].given) task.roll_pairs = natural_pairs(&cell);
    simulation *made;
    code = simulation_new(call, &cell, &task, in[REFERENCE].given ? in[REFERENCE].number : NAN,
                          &made);
    if (code != ALCHEMIST_OK) return code;
    simulation_free(call->state);
    call->state = made;
    return ALCHEMIST_OK;
}

/* --- spec --- */

ROUTINE(routine_spec) {
    (void)in;
    SIMULATION(S);
    const task_parameters *task = &S->task;
    const long long seen = (long long)(3 * task->probe_rows * task->heaters);
    char observed[64], acted[64];
    size_t room = 1600 + 40 * (size_t)task->heaters;
    char *text = call->host->allocate(call, room);
    if (text == NULL) return ALCHEMIST_FAILED;
    if (task->agents == 1) {
        snprintf(observed, sizeof observed, "%lld", seen);
        snprintf(acted, sizeof acted, "%lld", (long long)task->heaters);
    } else {
        snprintf(observed, sizeof observed, "%lld, %lld", (long long)task->agents, seen);
        snprintf(acted, sizeof acted, "%lld, 1", (long long)task->agents);
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
        observed, -OBSERVABLE, OBSERVABLE, acted, (long long)task->agents,
        (long long)task->episode_length,
        (double)S->substeps * S->L->cell.velocity / (double)S->L->cell.height,
        task->agents == 1 ? "reference - nusselt"
                         : "0.8 (reference - nusselt) + 0.2 (reference - nusselt above the heater "
                           "and the two beside it) / 4",
        HOT + task->amplitude);
    for (int64_t j = 0; j < task->heaters; j++)
        length += (size_t)snprintf(text + length, room - length, ", \"nusselt_above_%lld\"",
                                   (long long)j);
    length += (size_t)snprintf(text + length, room - length, "]");
    if (S->transient)
        length += (size_t)snprintf(
            text + length, room - length,
            ", \"warning\": \"rewards are counted from a flow that has not developed: after "
            "spin_up=%g its Nusselt number is %.3f, and %.3f through the plates, so that the return "
            "of doing nothing is not 0. Choose a longer spin_up (default 100) or set reference\"",
            task->spin_up, S->reference, S->carried);
    snprintf(text + length, room - length, "}");
    out[0].string = text;
    return ALCHEMIST_OK;
}
