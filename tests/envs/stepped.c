/* An MPI program for the simulator `program`: a rod, heated at its left end; each rank computes its cells. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CELLS 8

int main(int argc, char **argv) {
    int rank, size, steps = 0, binary = argc > 1 && strcmp(argv[1], "binary") == 0;
    double heat[CELLS] = {0};
    char line[256], word[16];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (;;) {
        double new[CELLS] = {0}, given = 0, answer[CELLS + 3];
        if (rank == 0 && fgets(line, sizeof line, stdin) == NULL) strcpy(line, "quit");
        MPI_Bcast(line, sizeof line, MPI_CHAR, 0, MPI_COMM_WORLD);
        sscanf(line, "%15s %lf", word, &given);
        if (strcmp(word, "quit") == 0) break;
        if (given == 91) sleep(1000);
        if (given == 92 && rank == size - 1) {
            fprintf(stderr, "the mesh is torn\n");
            exit(3);
        }
        if (given == 93) break; /* before its answer */
        if (given == 94) MPI_Abort(MPI_COMM_WORLD, 5);
        if (given == 95 && rank == 0) printf("banner\n"), fflush(stdout);
        if (strcmp(word, "reset") == 0) {
            for (int i = 0; i < CELLS; i++) heat[i] = given + i;
            steps = 0;
        } else {
            for (int i = rank * CELLS / size; i < (rank + 1) * CELLS / size; i++)
                new[i] = heat[i] + 0.25 * ((i > 0 ? heat[i - 1] : given) - 2 * heat[i] +
                                           (i < CELLS - 1 ? heat[i + 1] : 0.0));
            MPI_Allreduce(new, heat, CELLS, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
            steps++;
        }
        memcpy(answer, heat, sizeof heat);
        answer[CELLS] = -heat[0];      /* the reward */
        answer[CELLS + 1] = size;      /* info */
        answer[CELLS + 2] = steps > 4; /* the episode has ended */
        int count = strcmp(word, "reset") == 0 ? CELLS : CELLS + 3;
        if (rank == 0) {
            if (binary) fwrite(answer, sizeof *answer, (size_t)count, stdout);
            for (int i = 0; i < count && !binary; i++) printf("%.17g%c", answer[i], i + 1 < count ? ' ' : '\n');
            fflush(stdout);
        }
    }
    if (rank == 0 && getenv("ENDED")) fclose(fopen(getenv("ENDED"), "w"));
    MPI_Finalize();
    return 0;
}
