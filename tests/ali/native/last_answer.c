/* An MPI program for tests: rank 0's last answer comes without a question, just before
   MPI_Finalize; with an argument, the end of its input comes between the two. */
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
        while (argc > 1 && getchar() != EOF);
    }
    MPI_Finalize();
    return 0;
}
