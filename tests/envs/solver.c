/* An MPI program that knows nothing of Alchemist: rank 0 reads commands, all ranks compute. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int rank, size;
    double x = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (;;) {
        char line[256] = "quit", word[16];
        double number = 0;
        if (rank == 0 && fgets(line, sizeof line, stdin) == NULL) strcpy(line, "quit");
        MPI_Bcast(line, sizeof line, MPI_CHAR, 0, MPI_COMM_WORLD);
        sscanf(line, "%15s %lf", word, &number);
        if (strcmp(word, "quit") == 0) break;
        if (number == 91) sleep(1000);
        if (number > 90) {
            fprintf(stderr, "solver: the mesh is torn\n");
            exit(3);
        }
        if (strcmp(word, "reset") == 0) x = number;
        if (strcmp(word, "step") == 0) {
            double mine = (x + number) / size;
            MPI_Allreduce(&mine, &x, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        }
        if (rank == 0) printf("%.17g %d\n", x, size), fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
