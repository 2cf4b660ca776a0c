/* Rayleigh-Benard convection with a heated plate to control, as a library of Alchemist on Ray: the
 * routines of a simulator (envs/README.md), and those that look at the physics. */
#include "library.h"

#include <math.h>

/* --- episodes --- */

static ROUTINE(seed) {
    (void)out;
    simulation *S = simulated(call);
    if (S == NULL) return ALCHEMIST_FAILED;
    simulation_seed(S, in[0].integer);
    return ALCHEMIST_OK;
}

static ROUTINE(reset) {
    (void)in, (void)out;
    simulation *S = simulated(call);
    return S == NULL ? ALCHEMIST_FAILED : simulation_reset(call, S);
}

static ROUTINE(step) {
    (void)out;
    simulation *S = simulated(call);
    if (S == NULL) return ALCHEMIST_FAILED;
    if (in[0].count != S->has.heaters)
        return alchemist_refuse(call, "an action has %lld numbers, one for each heater, not %lld",
                                (long long)S->has.heaters, (long long)in[0].count);
    for (int64_t j = 0; j < in[0].count; j++)
        if (!isfinite(in[0].numbers[j]))
            return alchemist_refuse(call, "action[%lld] is %g: it must be finite", (long long)j,
                                    in[0].numbers[j]);
    return simulation_step(call, S, in[0].numbers);
}

static ROUTINE(get_state) {
    (void)in;
    simulation *S = simulated(call);
    double *numbers;
    if (S == NULL) return ALCHEMIST_FAILED;
    int code = simulation_measure(call, S);
    if (code) return code;
    const int64_t seen = 3 * S->has.probe_rows * S->has.heaters;
    if ((code = give_numbers(call, out, S->has.agents * seen, &numbers))) return code;
    for (int64_t agent = 0; agent < S->has.agents; agent++)
        simulation_observe(S, agent, numbers + agent * seen);
    return ALCHEMIST_OK;
}

static ROUTINE(get_score) {
    (void)in;
    simulation *S = simulated(call);
    double *numbers;
    if (S == NULL) return ALCHEMIST_FAILED;
    int code = simulation_measure(call, S);
    if (code) return code;
    const measures *found = &S->found;
    code = give_numbers(call, out, S->has.agents + 4 + S->has.heaters, &numbers);
    if (code) return code;
    for (int64_t agent = 0; agent < S->has.agents; agent++)
        *numbers++ = simulation_reward(S, agent);
    *numbers++ = found->nusselt;
    *numbers++ = found->nusselt_bottom;
    *numbers++ = found->nusselt_top;
    *numbers++ = found->kinetic_energy;
    memcpy(numbers, S->local, (size_t)S->has.heaters * sizeof(double));
    return ALCHEMIST_OK;
}

static ROUTINE(is_terminated) {
    (void)in;
    simulation *S = simulated(call);
    if (S == NULL) return ALCHEMIST_FAILED;
    int code = simulation_measure(call, S);
    if (code) return code;
    out[0].flag = !isfinite(S->found.nusselt) || !isfinite(S->found.kinetic_energy);
    return ALCHEMIST_OK;
}

static void given_up(void *state) { simulation_free(state); }

/* --- physics --- */

static ROUTINE(run) {
    (void)out;
    simulation *S = simulated(call);
    if (S == NULL) return ALCHEMIST_FAILED;
    if (in[0].integer < 0)
        return alchemist_refuse(call, "%lld steps cannot be run", (long long)in[0].integer);
    S->measured = 0;
    return lattice_run(call, S->L, in[0].integer);
}

static ROUTINE(measure) {
    (void)in;
    simulation *S = simulated(call);
    if (S == NULL) return ALCHEMIST_FAILED;
    int code = simulation_measure(call, S);
    if (code) return code;
    const measures *found = &S->found;
    const double numbers[] = {
        found->nusselt, found->nusselt_bottom, found->nusselt_top, found->kinetic_energy,
        found->mass, found->heat, found->heat_entered, found->heat_left,
        (double)S->L->steps * S->L->is.velocity / (double)S->L->is.height};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) out[i].number = numbers[i];
    return ALCHEMIST_OK;
}

static const alchemist_routine routines[] = {
    {.name = "setup",
     .doc = "Make a cell and let its flow develop. Costs spin_up * height / velocity lattice steps.",
     .run = routine_setup,
     .parameters = ALCHEMIST_PARAMETERS(
         {"height", ALCHEMIST_INT, "nodes from plate to plate", "31"},
         {"width", ALCHEMIST_INT, "nodes sideways, periodic; one or more for each rank", "96"},
         {"rayleigh", ALCHEMIST_FLOAT, "Rayleigh number, with the whole height", "8e4"},
         {"prandtl", ALCHEMIST_FLOAT, "Prandtl number", "0.7"},
         {"velocity", ALCHEMIST_FLOAT, "free-fall velocity in nodes a step, up to 0.3", "0.2"},
         {"heaters", ALCHEMIST_INT, "equal pieces of the bottom plate", "12"},
         {"amplitude", ALCHEMIST_FLOAT, "the most a heater may differ from their mean", "0.75"},
         {"agents", ALCHEMIST_INT, "1, or one for each heater, who sees the cell from there", "1"},
         {"probe_rows", ALCHEMIST_INT, "probes above each heater", "4"},
         {"episode_length", ALCHEMIST_INT, "actions", "200"},
         {"time_step", ALCHEMIST_FLOAT, "between actions, in free-fall times", "1.0"},
         {"spin_up", ALCHEMIST_FLOAT, "free-fall times before the first episode", "100.0"},
         {"roll_pairs", ALCHEMIST_INT, "to begin with; left out: as is natural", "null"},
         {"perturbation", ALCHEMIST_FLOAT, "of the temperature before the spin-up", "0.1"},
         {"disturbance", ALCHEMIST_FLOAT, "of the temperature at a reset, random", "0.05"},
         {"reference", ALCHEMIST_FLOAT,
          "Nusselt number that rewards are counted from; left out: the one after the spin-up",
          "null"})},
    {.name = "spec",
     .doc = "What is observed, what can be done, what is rewarded.",
     .run = routine_spec,
     .results = ALCHEMIST_RESULTS({"spec", ALCHEMIST_STRING, "JSON"})},
    {.name = "seed",
     .doc = "Begin the generator anew; takes effect at the next reset.",
     .run = seed,
     .parameters = ALCHEMIST_PARAMETERS({"seed", ALCHEMIST_INT, "any", NULL})},
    {.name = "reset",
     .doc = "The developed flow, moved sideways and disturbed at random, after one time step.",
     .run = reset},
    {.name = "step",
     .doc = "Heat the bottom plate for one time step: amplitude times the action, shifted until its "
            "mean is 0 with nothing beyond the amplitude.",
     .run = step,
     .parameters = ALCHEMIST_PARAMETERS(
         {"action", ALCHEMIST_FLOATS, "one number for each heater, -1 to 1", NULL})},
    {.name = "get_state",
     .doc = "The probes, for each heater: 2 T, 3 u, 3 v in free-fall units, bottom to top. With "
            "agents, as often as there are, each beginning with its own heater.",
     .run = get_state,
     .results = ALCHEMIST_RESULTS({"observation", ALCHEMIST_FLOATS, "in C order"})},
    {.name = "get_score",
     .doc = "The reward (of each agent), then what spec names in `info`.",
     .run = get_score,
     .results = ALCHEMIST_RESULTS({"score", ALCHEMIST_FLOATS, "rewards, then info"})},
    {.name = "is_terminated",
     .doc = "Whether the simulation has broken down: something is not finite.",
     .run = is_terminated,
     .results = ALCHEMIST_RESULTS({"terminated", ALCHEMIST_BOOL, "whether"})},
    {.name = "render",
     .doc = "The temperature from top to bottom: the cold plate, the fluid, the plate with the "
            "heaters; (height + 2) x width.",
     .run = routine_render,
     .results = ALCHEMIST_RESULTS({"temperature", ALCHEMIST_MATRIX, "on every rank"})},
    {.name = "save_state",
     .doc = "All there is to know of this moment, as a matrix that any number of ranks can load.",
     .run = routine_save_state,
     .results = ALCHEMIST_RESULTS({"state", ALCHEMIST_MATRIX, "a column for each of the cell's"})},
    {.name = "load_state",
     .doc = "Go on from a saved state, in the same bits.",
     .run = routine_load_state,
     .parameters = ALCHEMIST_PARAMETERS(
         {"state", ALCHEMIST_MATRIX, "of a cell of the same height and width", NULL})},
    {.name = "run",
     .doc = "Lattice steps with the bottom plate as it is.",
     .run = run,
     .parameters = ALCHEMIST_PARAMETERS({"steps", ALCHEMIST_INT, "how many", NULL})},
    {.name = "measure",
     .doc = "Nusselt numbers (of the volume, and through the plates), energy, and what is "
            "conserved: mass, and heat = heat at the beginning + entered - left.",
     .run = measure,
     .results = ALCHEMIST_RESULTS(
         {"nusselt", ALCHEMIST_FLOAT, "1 + <v T> height / diffusivity"},
         {"nusselt_bottom", ALCHEMIST_FLOAT, "through the bottom, in the last lattice step"},
         {"nusselt_top", ALCHEMIST_FLOAT, "through the top"},
         {"kinetic_energy", ALCHEMIST_FLOAT, "mean of (u u + v v) / 2, in free-fall units"},
         {"mass", ALCHEMIST_FLOAT, "sum over all nodes"},
         {"heat", ALCHEMIST_FLOAT, "sum over all nodes"},
         {"heat_entered", ALCHEMIST_FLOAT, "through the bottom since the state began"},
         {"heat_left", ALCHEMIST_FLOAT, "through the top"},
         {"time", ALCHEMIST_FLOAT, "since the state began, in free-fall times"})},
    {0}};

ALCHEMIST_LIBRARY_CLOSED("rayleigh_benard",
                         "Two-dimensional Rayleigh-Benard convection, heated in pieces from below: "
                         "a thermal lattice Boltzmann gas on slabs of columns.",
                         routines, given_up)
