/* Gather the columns of all slabs. */
#ifndef RAYLEIGH_BENARD_COLUMNS_H
#define RAYLEIGH_BENARD_COLUMNS_H

#include "slab.h"

/* Gather `count` numbers of every column of the cell on every rank, in order. Sums over the result
 * do not depend on the slab boundaries. The caller frees *all; it is not allocated on failure.
 * Collective. */
int gather_columns(alchemist_call *call, const lattice *L, const double *mine, int64_t count,
                   double **all);

#endif
