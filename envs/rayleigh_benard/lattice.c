/* The slab of a rank: memory, plates, halo and time steps. */
#include "lattice.h"

#include <math.h>

static const int TOWARDS_X[POPULATIONS] = {0, 1, 0, -1, 0, 1, -1, -1, 1, 0, 1, 0, -1, 0};
static const int TOWARDS_Y[POPULATIONS] = {0, 0, 1, 0, -1, 1, 1, -1, -1, 0, 0, 1, 0, -1};
static const double WEIGHT[POPULATIONS] = {4. / 9,  1. / 9,  1. / 9,  1. / 9, 1. / 9,
                                           1. / 36, 1. / 36, 1. / 36, 1. / 36, 1. / 3,
                                           1. / 6,  1. / 6,  1. / 6,  1. / 6};
static const int TO_THE_RIGHT[CROSSING] = {1, 5, 8, 10};
static const int TO_THE_LEFT[CROSSING] = {3, 6, 7, 12};

enum { RIGHTWARD = 1, LEFTWARD = 2 }; /* tags of the halo messages */
enum { NODES_BETWEEN_CHECKS = 1 << 18 };

/* --- memory --- */

static double *aligned(int64_t count) {
    size_t bytes = ((size_t)count * sizeof(double) + 63) / 64 * 64;
    double *found = aligned_alloc(64, bytes);
    if (found != NULL) memset(found, 0, bytes);
    return found;
}

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

lattice *lattice_new(alchemist_call *call, const cell_parameters *cell) {
    lattice *L = calloc(1, sizeof *L);
    if (L == NULL) goto full;
    const double free_fall = cell->velocity * (double)cell->height;
    L->cell = *cell;
    L->viscosity = free_fall * sqrt(cell->prandtl / cell->rayleigh);
    L->diffusivity = free_fall / sqrt(cell->prandtl * cell->rayleigh);
    L->buoyancy = cell->velocity * cell->velocity / (double)cell->height;
    L->first = lattice_first(cell->width, call->size, call->rank);
    L->columns = lattice_first(cell->width, call->size, call->rank + 1) - L->first;
    /* One extra row of nodes holds the populations reflected by the plates: those moving up below
     * node 0 (above the last node of the previous column), those moving down above the last. */
    L->pitch = round_up(cell->height + 1, LANES);
    /* Planes begin 5 cache lines off a multiple of the page, so that the 28 streams of a step map
     * to different cache sets. */
    L->plane = round_up(2 * LANES + (L->columns + 2) * L->pitch, 512) + 5 * LANES;
    L->now = aligned(POPULATIONS * L->plane);
    L->next = aligned(POPULATIONS * L->plane);
    L->bottom = aligned(RECORD * L->columns);
    if (L->now == NULL || L->next == NULL || L->bottom == NULL) goto full;
    L->entering = L->bottom + L->columns;
    L->leaving = L->entering + L->columns;
    L->entered = L->leaving + L->columns;
    L->left = L->entered + L->columns;
    return L;
full:
    lattice_free(L);
    alchemist_fail(call, "not enough memory for %lld x %lld nodes on rank %d: use more workers",
                   (long long)cell->height, (long long)cell->width, call->rank);
    return NULL;
}

void lattice_free(lattice *L) {
    if (L == NULL) return;
    free(L->now), free(L->next), free(L->bottom);
    if (!L->torn) free(L->outbox); /* torn: MPI may still write to it */
    free(L);
}

/* --- states --- */

/* Midpoint of node i as a fraction of the cell. */
static double middle(int64_t i, int64_t count) { return ((double)i + 0.5) / (double)count; }

static void clear_history(lattice *L) {
    memset(L->entering, 0, (size_t)(4 * L->columns) * sizeof(double));
    L->steps = 0;
    if (L->torn) L->outbox = NULL;
    L->torn = 0;
}

void lattice_rest(lattice *L, double (*temperature)(const void *, double, double),
                  const void *about) {
    clear_history(L);
    for (int64_t x = 0; x < L->columns; x++) {
        L->bottom[x] = HOT;
        for (int64_t y = 0; y < L->cell.height; y++) {
            double T = temperature(about, middle(L->first + x, L->cell.width),
                                   middle(y, L->cell.height));
            /* After a collision the populations carry half of the momentum of the force. */
            double push = 1.5 * L->buoyancy * T;
            for (int q = 0; q < POPULATIONS; q++)
                L->now[lattice_column(L, q, x) + y] =
                    WEIGHT[q] * (q < FLOW ? 1.0 + push * TOWARDS_Y[q] : T);
        }
    }
}

void lattice_warm(lattice *L, double (*temperature)(const void *, double, double),
                  const void *about) {
    for (int64_t x = 0; x < L->columns; x++)
        for (int64_t y = 0; y < L->cell.height; y++) {
            double T = temperature(about, middle(L->first + x, L->cell.width),
                                   middle(y, L->cell.height));
            for (int q = FLOW; q < POPULATIONS; q++)
                L->now[lattice_column(L, q, x) + y] += WEIGHT[q] * T;
        }
}

void lattice_save(const lattice *L, int64_t x, double *record) {
    const int64_t height = L->cell.height;
    for (int q = 0; q < POPULATIONS; q++)
        memcpy(record + q * height, L->now + lattice_column(L, q, x),
               (size_t)height * sizeof(double));
    record += POPULATIONS * height;
    for (int i = 0; i < RECORD; i++) record[i] = L->bottom[x + i * L->columns];
}

void lattice_load(lattice *L, int64_t x, const double *record) {
    const int64_t height = L->cell.height;
    if (x == 0) clear_history(L);
    for (int q = 0; q < POPULATIONS; q++)
        memcpy(L->now + lattice_column(L, q, x), record + q * height,
               (size_t)height * sizeof(double));
    record += POPULATIONS * height;
    for (int i = 0; i < RECORD; i++) L->bottom[x + i * L->columns] = record[i];
}

fluid lattice_fluid(const lattice *L, int64_t x, int64_t y) {
    fluid at = {0, 0, 0, 0};
    for (int q = 0; q < FLOW; q++) {
        double f = L->now[lattice_column(L, q, x) + y];
        at.density += f;
        at.u += TOWARDS_X[q] * f;
        at.v += TOWARDS_Y[q] * f;
    }
    for (int q = FLOW; q < POPULATIONS; q++)
        at.temperature += L->now[lattice_column(L, q, x) + y];
    /* Half of the force was applied in the collision; this is the velocity at its midpoint. */
    at.u /= at.density;
    at.v = at.v / at.density - 0.5 * L->buoyancy * at.temperature;
    return at;
}

/* --- plates --- */

/* Half-way bounce-back: populations that cross a plate return in the opposite direction, which
 * gives a no-slip plate half a node beyond the last node. Heat returns with the opposite sign plus the
 * temperature of the plate (anti-bounce-back: Ginzburg, Adv. Water Res. 28, 1171, 2005):
 * g_back = -g + 2 w T_plate, and the difference is the heat that crosses the plate. */
static void bounce(lattice *L) {
    const int64_t top = L->cell.height - 1;
    const double twice = 2.0 / 6.0;
    double *f2 = L->now + 2 * L->plane, *f4 = L->now + 4 * L->plane;
    double *f5 = L->now + 5 * L->plane, *f6 = L->now + 6 * L->plane;
    double *f7 = L->now + 7 * L->plane, *f8 = L->now + 8 * L->plane;
    double *up = L->now + 11 * L->plane, *down = L->now + 13 * L->plane;
    for (int64_t x = 0; x < L->columns; x++) {
        const int64_t low = lattice_column(L, 0, x), high = low + top;
        f2[low - 1] = f4[low];
        f5[low - 1 - L->pitch] = f7[low];
        f6[low - 1 + L->pitch] = f8[low];
        f4[high + 1] = f2[high];
        f7[high + 1 + L->pitch] = f5[high];
        f8[high + 1 - L->pitch] = f6[high];
        up[low - 1] = twice * L->bottom[x] - down[low];
        down[high + 1] = twice * COLD - up[high];
        L->entered[x] += L->entering[x] = up[low - 1] - down[low];
        L->left[x] += L->leaving[x] = up[high] - down[high + 1];
    }
}

/* --- halo --- */

static void pack_column(const lattice *L, const int *which, int64_t x, double *box) {
    for (int k = 0; k < CROSSING; k++)
        memcpy(box + k * L->cell.height, L->now + lattice_column(L, which[k], x),
               (size_t)L->cell.height * sizeof(double));
}

static void unpack_column(lattice *L, const int *which, int64_t x, const double *box) {
    for (int k = 0; k < CROSSING; k++)
        memcpy(L->now + lattice_column(L, which[k], x), box + k * L->cell.height,
               (size_t)L->cell.height * sizeof(double));
}

static int have_boxes(alchemist_call *call, lattice *L) {
    if (L->outbox == NULL) L->outbox = aligned(4 * CROSSING * L->cell.height);
    if (L->outbox == NULL)
        return alchemist_fail(call, "not enough memory for halo messages on rank %d", call->rank);
    L->inbox = L->outbox + 2 * CROSSING * L->cell.height;
    return ALCHEMIST_OK;
}

/* The cell is a ring of slabs. Inner columns are computed while the messages are in transit. */
static int start_halo(alchemist_call *call, lattice *L, MPI_Request requests[4]) {
    const int length = CROSSING * (int)L->cell.height;
    const int left = (call->rank + call->size - 1) % call->size;
    const int right = (call->rank + 1) % call->size;
    pack_column(L, TO_THE_RIGHT, L->columns - 1, L->outbox);
    pack_column(L, TO_THE_LEFT, 0, L->outbox + length);
    if (MPI_Irecv(L->inbox, length, MPI_DOUBLE, left, RIGHTWARD, call->comm, &requests[0]) ||
        MPI_Irecv(L->inbox + length, length, MPI_DOUBLE, right, LEFTWARD, call->comm,
                  &requests[1]) ||
        MPI_Isend(L->outbox, length, MPI_DOUBLE, right, RIGHTWARD, call->comm, &requests[2]) ||
        MPI_Isend(L->outbox + length, length, MPI_DOUBLE, left, LEFTWARD, call->comm,
                  &requests[3]))
        return alchemist_fail(call, "MPI could not exchange halo columns");
    return ALCHEMIST_OK;
}

static int finish_halo(alchemist_call *call, lattice *L, MPI_Request requests[4]) {
    int code;
    for (int i = 0; i < 4; i++)
        if ((code = alchemist_wait(call, &requests[i]))) return code;
    unpack_column(L, TO_THE_RIGHT, -1, L->inbox);
    unpack_column(L, TO_THE_LEFT, L->columns, L->inbox + CROSSING * L->cell.height);
    return ALCHEMIST_OK;
}

static void wrap_around(lattice *L) {
    const size_t bytes = (size_t)L->cell.height * sizeof(double);
    for (int k = 0; k < CROSSING; k++) {
        double *right = L->now + lattice_column(L, TO_THE_RIGHT[k], -1);
        double *left = L->now + lattice_column(L, TO_THE_LEFT[k], 0);
        memcpy(right, right + L->columns * L->pitch, bytes);
        memcpy(left + L->columns * L->pitch, left, bytes);
    }
}

/* --- time --- */

static int one_step(alchemist_call *call, lattice *L) {
    int code;
    MPI_Request requests[4];
    bounce(L);
    if (call->size == 1) {
        wrap_around(L);
        lattice_collide(L, 0, L->columns);
    } else {
        if ((code = start_halo(call, L, requests))) return code;
        if (L->columns > 2) lattice_collide(L, 1, L->columns - 1);
        if ((code = finish_halo(call, L, requests))) return code;
        lattice_collide(L, 0, 1);
        if (L->columns > 1) lattice_collide(L, L->columns - 1, L->columns);
    }
    double *swapped = L->now;
    L->now = L->next;
    L->next = swapped;
    L->steps++;
    return ALCHEMIST_OK;
}

int lattice_whole(alchemist_call *call, const lattice *L) {
    if (!L->torn) return ALCHEMIST_OK;
    return alchemist_fail(call, "a call was interrupted in a step: call reset() first");
}

int lattice_run(alchemist_call *call, lattice *L, int64_t steps) {
    const int64_t between = 1 + NODES_BETWEEN_CHECKS / (L->columns * L->pitch);
    int code;
    if ((code = lattice_whole(call, L))) return code;
    if (call->size > 1 && (code = have_boxes(call, L))) return code;
    L->torn = 1;
    for (int64_t i = 1; i <= steps; i++) {
        if ((code = one_step(call, L))) return code;
        if (i % between == 0 && (code = alchemist_check(call))) return code;
    }
    L->torn = 0;
    return ALCHEMIST_OK;
}

/* --- gathering --- */

int gather_columns(alchemist_call *call, const lattice *L, const double *mine, int64_t count,
                   double **all) {
    const size_t own = (size_t)(L->columns * count), whole = (size_t)(L->cell.width * count);
    const size_t ranks = (size_t)call->size;
    MPI_Datatype column;
    MPI_Request request;
    /* The result begins the block, and everything else that MPI accesses follows it. */
    double *block = malloc((whole + own) * sizeof(double) + 2 * ranks * sizeof(int));
    if (block == NULL)
        return alchemist_fail(call, "not enough memory to gather %zu numbers on rank %d", whole,
                              call->rank);
    int *counts = (int *)(block + whole + own), *shifts = counts + ranks;
    memcpy(block + whole, mine, own * sizeof(double));
    for (int r = 0; r < call->size; r++) {
        shifts[r] = (int)lattice_first(L->cell.width, call->size, r);
        counts[r] = (int)lattice_first(L->cell.width, call->size, r + 1) - shifts[r];
    }
    MPI_Type_contiguous((int)count, MPI_DOUBLE, &column);
    MPI_Type_commit(&column);
    int code = ALCHEMIST_OK;
    if (MPI_Iallgatherv(block + whole, (int)L->columns, column, block, counts, shifts, column,
                        call->comm, &request))
        code = alchemist_fail(call, "MPI could not gather columns");
    MPI_Type_free(&column); /* MPI keeps it until the exchange ends */
    if (code == ALCHEMIST_OK) code = alchemist_wait(call, &request);
    if (code == ALCHEMIST_OK) *all = block; /* else MPI may still write to it */
    return code;
}
