/* Nusselt numbers, probes and rewards.
 *
 * Every rank measures its own columns and adds up those of all ranks in the same order, so the
 * results are bit-identical on any number of ranks. */
#include "simulation.h"

#include <math.h>

/* Numbers per column: sums over its nodes, heat through the plates, and from PROBES on the sums
 * over the nodes of each probe: temperatures, then u, then v. */
enum { FLUX, ENERGY, MASS, HEAT, THROUGH_BOTTOM, THROUGH_TOP, ENTERED, LEFT, PROBES };

/* Scales of the observed probes, which bring all of them to at most about 1. */
static const double TEMPERATURE_SCALE = 2.0, VELOCITY_SCALE = 3.0;
/* Weight of the local flux (above the agent's heater and its two neighbours) in an agent's reward,
 * and the ratio of its variation to that of the whole cell. */
static const double OWN_SHARE = 0.2, OWN_SPREAD = 4.0;

int64_t measured_of_a_column(const task_parameters *task) { return PROBES + 3 * task->probe_rows; }

static void measure_column(const simulation *S, int64_t x, double *column) {
    const lattice *L = S->L;
    const int64_t height = L->cell.height, rows = S->task.probe_rows;
    memset(column, 0, (size_t)measured_of_a_column(&S->task) * sizeof(double));
    for (int64_t y = 0; y < height; y++) {
        const fluid at = lattice_fluid(L, x, y);
        double *probe = column + PROBES + piece_of(y, rows, height);
        column[FLUX] += at.v * at.temperature;
        column[ENERGY] += at.u * at.u + at.v * at.v;
        column[MASS] += at.density;
        column[HEAT] += at.temperature;
        probe[0] += at.temperature;
        probe[rows] += at.u;
        probe[2 * rows] += at.v;
    }
    column[THROUGH_BOTTOM] = L->entering[x];
    column[THROUGH_TOP] = L->leaving[x];
    column[ENTERED] = L->entered[x];
    column[LEFT] = L->left[x];
}

/* The sum of one of the numbers over the columns from..to of the cell. */
static double sum(const simulation *S, const double *all, int64_t which, int64_t from,
                  int64_t to) {
    const int64_t count = measured_of_a_column(&S->task);
    double found = 0;
    for (int64_t x = from; x < to; x++) found += all[x * count + which];
    return found;
}

static void measure_cell(simulation *S, const double *all) {
    const lattice *L = S->L;
    const int64_t width = L->cell.width, height = L->cell.height;
    const double nodes = (double)width * (double)height;
    const double conducted = L->diffusivity / (double)height; /* conductive flux through a node */
    const double unit = L->cell.velocity * L->cell.velocity;
    S->found[NUSSELT] = 1 + sum(S, all, FLUX, 0, width) / nodes / conducted;
    S->found[NUSSELT_BOTTOM] = sum(S, all, THROUGH_BOTTOM, 0, width) / (double)width / conducted;
    S->found[NUSSELT_TOP] = sum(S, all, THROUGH_TOP, 0, width) / (double)width / conducted;
    S->found[KINETIC_ENERGY] = 0.5 * sum(S, all, ENERGY, 0, width) / nodes / unit;
    S->found[TOTAL_MASS] = sum(S, all, MASS, 0, width);
    S->found[TOTAL_HEAT] = sum(S, all, HEAT, 0, width);
    S->found[HEAT_ENTERED] = sum(S, all, ENTERED, 0, width);
    S->found[HEAT_LEFT] = sum(S, all, LEFT, 0, width);
}

static void measure_above(simulation *S, const double *all, int64_t heater) {
    const int64_t width = S->L->cell.width, height = S->L->cell.height;
    const int64_t rows = S->task.probe_rows, n = S->task.heaters;
    const int64_t from = piece_begins(heater, n, width), to = piece_begins(heater + 1, n, width);
    const double columns = (double)(to - from), velocity = S->L->cell.velocity;
    const double conducted = S->L->diffusivity / (double)height;
    S->local[heater] =
        1 + sum(S, all, FLUX, from, to) / columns / (double)height / conducted;
    double *probes = S->probes + 3 * rows * heater;
    for (int64_t k = 0; k < 3 * rows; k++) {
        const int64_t row = k % rows;
        const double nodes = columns * (double)(piece_begins(row + 1, rows, height) -
                                               piece_begins(row, rows, height));
        const double mean = sum(S, all, PROBES + k, from, to) / nodes;
        const double seen = k < rows ? TEMPERATURE_SCALE * mean : VELOCITY_SCALE * mean / velocity;
        probes[k] = fmax(-OBSERVABLE, fmin(seen, OBSERVABLE));
    }
}

int simulation_measure(alchemist_call *call, simulation *S) {
    const int64_t count = measured_of_a_column(&S->task);
    int code = lattice_whole(call, S->L);
    if (code != ALCHEMIST_OK || S->measured) return code;
    for (int64_t x = 0; x < S->L->columns; x++) measure_column(S, x, S->columns + x * count);
    double *all;
    code = gather_columns(call, S->L, S->columns, count, &all);
    if (code != ALCHEMIST_OK) return code;
    measure_cell(S, all);
    for (int64_t j = 0; j < S->task.heaters; j++) measure_above(S, all, j);
    free(all);
    S->measured = 1;
    return ALCHEMIST_OK;
}

void simulation_observe(const simulation *S, int64_t agent, double *observation) {
    const int64_t each = 3 * S->task.probe_rows, n = S->task.heaters;
    memcpy(observation, S->probes + each * agent, (size_t)(each * (n - agent)) * sizeof(double));
    memcpy(observation + each * (n - agent), S->probes, (size_t)(each * agent) * sizeof(double));
}

double simulation_reward(const simulation *S, int64_t agent) {
    const double whole = S->reference - S->found[NUSSELT];
    if (S->task.agents == 1) return whole;
    const int64_t n = S->task.heaters;
    const double own = (S->local[(agent + n - 1) % n] + S->local[agent] +
                        S->local[(agent + 1) % n]) / 3;
    return (1 - OWN_SHARE) * whole + OWN_SHARE * (S->reference - own) / OWN_SPREAD;
}
