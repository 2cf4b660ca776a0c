/* Loops of one MPI call each, as native code makes them. */
#include <mpi.h>
#include <stdlib.h>

/* The seconds of one turn of a loop: 0 there and back, 1 Barrier, 2 Allreduce, 3 Bcast, roots in turn. */
double seconds_of(int what, int bytes, int turns, MPI_Fint handle) {
    MPI_Comm comm = MPI_Comm_f2c(handle);
    int rank, size;
    double *x = calloc((size_t)bytes + 8, 1), *y = calloc((size_t)bytes + 8, 1);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    const int other = rank ^ 1; /* the ranks are in pairs */
    MPI_Barrier(comm);
    const double begun = MPI_Wtime();
    for (int i = 0; i < turns; i++)
        if (what == 1)
            MPI_Barrier(comm);
        else if (what == 2)
            MPI_Allreduce(x, y, bytes / 8, MPI_DOUBLE, MPI_SUM, comm);
        else if (what == 3)
            MPI_Bcast(x, bytes, MPI_BYTE, i % size, comm);
        else if (rank & 1) {
            MPI_Recv(y, bytes, MPI_BYTE, other, 0, comm, MPI_STATUS_IGNORE);
            MPI_Send(x, bytes, MPI_BYTE, other, 0, comm);
        } else {
            MPI_Send(x, bytes, MPI_BYTE, other, 0, comm);
            MPI_Recv(y, bytes, MPI_BYTE, other, 0, comm, MPI_STATUS_IGNORE);
        }
    const double took = (MPI_Wtime() - begun) / turns;
    free(x);
    free(y);
    return took;
}
