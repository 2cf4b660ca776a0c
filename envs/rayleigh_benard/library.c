/* Rayleigh-Benard convection with a controlled plate as a library of Alchemist on Ray: the routines
 * of a simulator (docs/environments.md) and routines that measure the physics. */
#include <math.h>

#include "simulation.h"

/* --- episodes --- */

static ROUTINE(seed) {
    (void)out;
    SIMULATION(S);
    S->random = (uint64_t)in[0].integer;
    return ALCHEMIST_OK;
}

static ROUTINE(reset) {
    (void)in, (void)out;
    SIMULATION(S);
    return simulation_reset(call, S);
}

static ROUTINE(step) {
    (void)out;
    SIMULATION(S);
    if (in[0].count != S->task.heaters)
        return alchemist_refuse(call, "an action has %lld numbers, one per heater, not %lld",
                                (long long)S->task.heaters, (long long)in[0].count);
    for (int64_t j = 0; j < in[0].count; j++)
        if (!isfinite(in[0].numbers[j]))
            return alchemist_refuse(call, "action[%lld] is %g: it must be finite", (long long)j,
                                    in[0].numbers[j]);
    return simulation_step(call, S, in[0].numbers);
}

static ROUTINE(get_state) {
    (void)in;
    MEASURED(S);
    const int64_t seen = 3 * S->task.probe_rows * S->task.heaters;
    double *numbers = give_numbers(call, out, S->task.agents * seen);
    if (numbers == NULL) return ALCHEMIST_FAILED;
    for (int64_t agent = 0; agent < S->task.agents; agent++)
        simulation_observe(S, agent, numbers + agent * seen);
    return ALCHEMIST_OK;
}

static ROUTINE(get_score) {
    (void)in;
    MEASURED(S);
    double *numbers = give_numbers(call, out, S->task.agents + SCORED + S->task.heaters);
    if (numbers == NULL) return ALCHEMIST_FAILED;
    for (int64_t agent = 0; agent < S->task.agents; agent++)
        *numbers++ = simulation_reward(S, agent);
    memcpy(numbers, S->found, SCORED * sizeof(double));
    memcpy(numbers + SCORED, S->local, (size_t)S->task.heaters * sizeof(double));
    return ALCHEMIST_OK;
}

static ROUTINE(is_terminated) {
    (void)in;
    MEASURED(S);
    out[0].flag = !isfinite(S->found[NUSSELT]) || !isfinite(S->found[KINETIC_ENERGY]);
    return ALCHEMIST_OK;
}

/* --- physics --- */

static ROUTINE(run) {
    (void)out;
    SIMULATION(S);
    if (in[0].integer < 0)
        return alchemist_refuse(call, "cannot run %lld steps: the number must be 0 or more",
                                (long long)in[0].integer);
    S->measured = 0;
    return lattice_run(call, S->L, in[0].integer);
}

static ROUTINE(measure) {
    (void)in;
    MEASURED(S);
    for (int i = 0; i < MEASURES; i++) out[i].number = S->found[i];
    out[MEASURES].number = (double)S->L->steps * S->L->cell.velocity / (double)S->L->cell.height;
    return ALCHEMIST_OK;
}

static const alchemist_routine routines[] = {
    {.name = "setup",
     .doc = "Build a cell and develop its flow. Costs spin_up * height / velocity lattice steps.",
     .run = routine_setup,
     .parameters = ALCHEMIST_PARAMETERS(
         {"height", ALCHEMIST_INT, "nodes from plate to plate", "31"},
         {"width", ALCHEMIST_INT, "nodes sideways, periodic; at least one per rank", "96"},
         {"rayleigh", ALCHEMIST_FLOAT, "Rayleigh number, with the whole height", "8e4"},
         {"prandtl", ALCHEMIST_FLOAT, "Prandtl number", "0.7"},
         {"velocity", ALCHEMIST_FLOAT, "free-fall velocity in nodes per step, up to 0.3", "0.2"},
         {"heaters", ALCHEMIST_INT, "equal pieces of the bottom plate", "12"},
         {"amplitude", ALCHEMIST_FLOAT, "largest deviation of a heater from the mean", "0.75"},
         {"agents", ALCHEMIST_INT, "1, or one per heater", "1"},
         {"probe_rows", ALCHEMIST_INT, "probes above each heater", "4"},
         {"episode_length", ALCHEMIST_INT, "actions", "200"},
         {"time_step", ALCHEMIST_FLOAT, "time between actions, in free-fall times", "1.0"},
         {"spin_up", ALCHEMIST_FLOAT, "free-fall times before the first episode", "100.0"},
         {"roll_pairs", ALCHEMIST_INT,
          "pairs of rolls in the initial temperature; default: from the width", "null"},
         {"perturbation", ALCHEMIST_FLOAT, "amplitude of the initial temperature wave", "0.1"},
         {"disturbance", ALCHEMIST_FLOAT, "amplitude of the random change at a reset", "0.05"},
         {"reference", ALCHEMIST_FLOAT,
          "Nusselt number from which rewards are counted; default: its value after the spin-up",
          "null"})},
    {.name = "spec",
     .doc = "Describe observation, action and reward.",
     .run = routine_spec,
     .results = ALCHEMIST_RESULTS({"spec", ALCHEMIST_STRING, "JSON"})},
    {.name = "seed",
     .doc = "Seed the generator; takes effect at the next reset.",
     .run = seed,
     .parameters = ALCHEMIST_PARAMETERS({"seed", ALCHEMIST_INT, "any integer", NULL})},
    {.name = "reset",
     .doc = "Begin an episode: the developed flow, shifted sideways and disturbed at random.",
     .run = reset},
    {.name = "step",
     .doc = "Heat the bottom plate for one time step by amplitude times the action, clipped to "
            "[-1, 1] and shifted to zero mean.",
     .run = step,
     .parameters = ALCHEMIST_PARAMETERS(
         {"action", ALCHEMIST_FLOATS, "one number per heater, -1 to 1", NULL})},
    {.name = "get_state",
     .doc = "The probes of each heater: 2 T, 3 u, 3 v in free-fall units, bottom to top. With "
            "several agents, one observation each, beginning with its own heater.",
     .run = get_state,
     .results = ALCHEMIST_RESULTS({"observation", ALCHEMIST_FLOATS, "in C order"})},
    {.name = "get_score",
     .doc = "The reward (of each agent), then the numbers that spec names in `info`.",
     .run = get_score,
     .results = ALCHEMIST_RESULTS({"score", ALCHEMIST_FLOATS, "rewards, then info"})},
    {.name = "is_terminated",
     .doc = "Whether the simulation has diverged: a measurement is not finite.",
     .run = is_terminated,
     .results = ALCHEMIST_RESULTS({"terminated", ALCHEMIST_BOOL, "true if it has"})},
    {.name = "render",
     .doc = "The temperature from top to bottom: cold plate, fluid, plate with the heaters; "
            "(height + 2) x width.",
     .run = routine_render,
     .results = ALCHEMIST_RESULTS({"temperature", ALCHEMIST_MATRIX, "replicated on every rank"})},
    {.name = "save_state",
     .doc = "The complete state, as a matrix that any number of ranks can load.",
     .run = routine_save_state,
     .results = ALCHEMIST_RESULTS({"state", ALCHEMIST_MATRIX, "a column per column of the cell"})},
    {.name = "load_state",
     .doc = "Continue from a saved state, bit-identically.",
     .run = routine_load_state,
     .parameters = ALCHEMIST_PARAMETERS(
         {"state", ALCHEMIST_MATRIX, "of a cell of the same height and width", NULL})},
    {.name = "run",
     .doc = "Run lattice steps with the bottom plate unchanged.",
     .run = run,
     .parameters = ALCHEMIST_PARAMETERS({"steps", ALCHEMIST_INT, "number of steps", NULL})},
    {.name = "measure",
     .doc = "Nusselt numbers (of the volume, and through the plates), energy, and the conserved "
            "quantities: mass, and heat = initial heat + entered - left.",
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
                         "Two-dimensional Rayleigh-Benard convection with separate heaters below: "
                         "a thermal lattice Boltzmann gas on slabs of columns.",
                         routines, simulation_free)
