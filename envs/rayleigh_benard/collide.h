/* One time step of a range of columns. */
#ifndef RAYLEIGH_BENARD_COLLIDE_H
#define RAYLEIGH_BENARD_COLLIDE_H

#include "slab.h"

/* Stream, collide and force columns first to last, from L->now into L->next. */
void lattice_collide(lattice *L, int64_t first, int64_t last);

#endif
