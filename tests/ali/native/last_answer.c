/* An MPI program for tests: its last answer comes just before MPI_Finalize, without a question. */
#include <mpi.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int rank;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 0) {
        puts("first");
        fflush(stdout);
        usleep(100000);
        puts("last");
        fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
