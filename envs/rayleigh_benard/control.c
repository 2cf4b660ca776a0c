/* Heaters and episodes of a controlled Rayleigh-Benard cell. */
#include "simulation.h"

#include <math.h>

#define PI 3.14159265358979323846

enum { WAVES = 4 }; /* of the disturbance at a reset */

/* Fraction of a heater at either end that blends linearly into its neighbour. */
static const double BLEND = 0.1;
/* Relative difference of heat fluxes from which on a flow has not developed. On the default cell it
 * is 0.48 after 5 free-fall times, 0.03 after 30, 0.007 after 40. */
static const double UNBALANCED = 0.02;

/* --- the generator: splitmix64 (Steele, Lea & Flood, OOPSLA 2014) --- */

static uint64_t next_bits(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static double uniform(uint64_t *state) { return (double)(next_bits(state) >> 11) * 0x1p-53; }

/* --- temperatures --- */

typedef struct {
    double amplitude[WAVES], phase[WAVES];
} waves;

static double disturbed(const void *about, double x, double y) {
    const waves *w = about;
    double sum = 0;
    for (int k = 0; k < WAVES; k++)
        sum += w->amplitude[k] * cos(2 * PI * ((k + 1) * x + w->phase[k]));
    return sum * sin(PI * y);
}

static double conduction(const void *about, double x, double y) {
    const task_parameters *task = about;
    double wave = cos(2 * PI * (double)task->roll_pairs * x);
    return HOT - y + task->perturbation * wave * sin(PI * y);
}

/* --- construction --- */

static double *numbers(int64_t count) { return calloc((size_t)count, sizeof(double)); }

static int have_arrays(simulation *S) {
    const task_parameters *task = &S->task;
    S->developed = numbers(S->L->columns * lattice_record(S->L));
    S->columns = numbers(S->L->columns * measured_of_a_column(task));
    S->local = numbers(task->heaters);
    S->probes = numbers(3 * task->probe_rows * task->heaters);
    return S->developed && S->columns && S->local && S->probes;
}

/* Whether the fluid carries the heat that enters and leaves, and no less than by conduction. */
static int developed(const simulation *S) {
    const double carried = S->found[NUSSELT];
    return fabs(carried - S->carried) <= UNBALANCED * carried && carried >= 1 - UNBALANCED;
}

static int spin_up(alchemist_call *call, simulation *S, double reference) {
    const double free_fall = (double)S->L->cell.height / S->L->cell.velocity;
    int code;
    S->substeps = llround(S->task.time_step * free_fall);
    if (S->substeps < 1) S->substeps = 1;
    lattice_rest(S->L, conduction, &S->task);
    if ((code = lattice_run(call, S->L, llround(S->task.spin_up * free_fall)))) return code;
    if ((code = simulation_measure(call, S))) return code;
    S->carried = 0.5 * (S->found[NUSSELT_BOTTOM] + S->found[NUSSELT_TOP]);
    S->reference = isnan(reference) ? S->found[NUSSELT] : reference;
    S->transient = isnan(reference) && !developed(S);
    for (int64_t x = 0; x < S->L->columns; x++)
        lattice_save(S->L, x, S->developed + x * lattice_record(S->L));
    return ALCHEMIST_OK;
}

int simulation_new(alchemist_call *call, const cell_parameters *cell, const task_parameters *task,
                   double reference, simulation **made) {
    simulation *S = calloc(1, sizeof *S);
    if (S == NULL) return alchemist_fail(call, "not enough memory on rank %d", call->rank);
    int code = ALCHEMIST_FAILED;
    S->task = *task;
    S->L = lattice_new(call, cell);
    if (S->L != NULL) {
        if (have_arrays(S))
            code = spin_up(call, S, reference);
        else
            alchemist_fail(call, "not enough memory on rank %d", call->rank);
    }
    if (code == ALCHEMIST_OK)
        *made = S;
    else
        simulation_free(S);
    return code;
}

void simulation_free(void *state) {
    simulation *S = state;
    if (S == NULL) return;
    lattice_free(S->L);
    free(S->developed), free(S->columns), free(S->local), free(S->probes);
    free(S);
}

/* --- episodes --- */

/* The developed flow, shifted sideways and disturbed at random, after one time step. */
int simulation_reset(alchemist_call *call, simulation *S) {
    lattice *L = S->L;
    const int64_t width = L->cell.width, record = lattice_record(L);
    uint64_t random = S->random; /* stored only if the reset succeeds */
    const int64_t shift = (int64_t)(uniform(&random) * (double)width);
    waves w;
    for (int k = 0; k < WAVES; k++) {
        w.amplitude[k] = S->task.disturbance * (2 * uniform(&random) - 1);
        w.phase[k] = uniform(&random);
    }
    double *all;
    int code = gather_columns(call, L, S->developed, record, &all);
    if (code != ALCHEMIST_OK) return code;
    for (int64_t x = 0; x < L->columns; x++)
        lattice_load(L, x, all + (L->first + x + shift) % width * record);
    free(all);
    for (int64_t x = 0; x < L->columns; x++) L->entered[x] = L->left[x] = 0;
    S->measured = 0;
    S->actions = 0;
    lattice_warm(L, disturbed, &w);
    code = lattice_run(call, L, S->substeps);
    if (code == ALCHEMIST_OK) S->random = random;
    return code;
}

static double within(double low, double x, double high) { return fmax(low, fmin(x, high)); }

/* Sets the heaters for an action lowered by `shift`; returns their sum. */
static double total(const task_parameters *task, const double *action, double shift,
                    double *heaters) {
    double sum = 0;
    for (int64_t j = 0; j < task->heaters; j++) {
        heaters[j] = task->amplitude * within(-1, within(-1, action[j], 1) - shift, 1);
        sum += heaters[j];
    }
    return sum;
}

void heaters_from(const task_parameters *task, const double *action, double *heaters) {
    double low = -1, high = 1; /* the sum decreases with the shift and is 0 between these */
    for (int halvings = 0; halvings < 60; halvings++) {
        const double middle = 0.5 * (low + high);
        if (total(task, action, middle, heaters) > 0)
            low = middle;
        else
            high = middle;
    }
    total(task, action, high, heaters);
}

static void heat_plate(simulation *S, const double *heaters) {
    const int64_t n = S->task.heaters;
    for (int64_t x = 0; x < S->L->columns; x++) {
        const int64_t node = S->L->first + x, j = piece_of(node, n, S->L->cell.width);
        const double at = ((double)node + 0.5) / (double)S->L->cell.width;
        const double part = at * (double)n - (double)j;
        double own = heaters[j];
        const double before = heaters[(j + n - 1) % n], after = heaters[(j + 1) % n];
        if (part < BLEND)
            own += 0.5 * (before - own) * (1 - part / BLEND);
        else if (part > 1 - BLEND)
            own += 0.5 * (after - own) * (1 - (1 - part) / BLEND);
        S->L->bottom[x] = HOT + own;
    }
}

int simulation_step(alchemist_call *call, simulation *S, const double *action) {
    double *heaters = numbers(S->task.heaters);
    if (heaters == NULL) return alchemist_fail(call, "not enough memory on rank %d", call->rank);
    heaters_from(&S->task, action, heaters);
    heat_plate(S, heaters);
    free(heaters);
    S->measured = 0;
    int code = lattice_run(call, S->L, S->substeps);
    if (code == ALCHEMIST_OK) S->actions++;
    return code;
}
