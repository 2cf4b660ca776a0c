/* An MPI program for the tests of run_program; its first argument says how it ends. */
#include <alchemist_client.h>
#include <signal.h>
#include <unistd.h>

static void stop_unless(int code, int line) {
    if (code == ALCHEMIST_OK) return;
    fprintf(stderr, "line %d: %s\n", line, alchemist_client_error());
    MPI_Abort(MPI_COMM_WORLD, 9);
}

static void scale(const char *name) {
    alchemist_matrix A, B, sums;
    stop_unless(alchemist_attach(name, ALCHEMIST_FLOAT64, ALCHEMIST_ANY, &A), __LINE__);
    stop_unless(alchemist_create("B", A.rows, A.cols, 2, A.dtype, A.layout, &B), __LINE__);
    stop_unless(alchemist_create("sums", A.rows, 1, 1, ALCHEMIST_FLOAT64, ALCHEMIST_VC_STAR, &sums),
                __LINE__);
    double *from = (double *)A.data, *to = (double *)B.data, *sum = (double *)sums.data;
    for (int64_t j = 0; j < A.local_cols; j++)
        for (int64_t i = 0; i < A.local_rows; i++) {
            to[i + j * B.leading_dimension] = 2 * from[i + j * A.leading_dimension];
            sum[i] += from[i + j * A.leading_dimension];
            from[i + j * A.leading_dimension] = alchemist_global_row(&A, i);
        }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "no-init")) return argc > 2 ? atoi(argv[2]) : 0;
    if (!strcmp(what, "attach")) { /* before MPI_Init: an abort leaves a file in /dev/shm */
        alchemist_matrix A;
        if (alchemist_attach("A", ALCHEMIST_FLOAT64, ALCHEMIST_VC_STAR, &A) == ALCHEMIST_OK) return 0;
        fprintf(stderr, "%s\n", alchemist_client_error());
        return 1;
    }
    MPI_Init(&argc, &argv);
    int rank, size, left;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Sendrecv(&rank, 1, MPI_INT, (rank + 1) % size, 0, &left, 1, MPI_INT,
                 (rank + size - 1) % size, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    printf("rank %d of %d, %d is on its left\n", rank, size, left);
    if (!strcmp(what, "cat")) {
        char line[100];
        while (fgets(line, sizeof line, stdin)) printf("read %s", line);
    }
    const int last = rank == size - 1;
    if (!strcmp(what, "scale")) scale(argv[2]);
    if (!strcmp(what, "abort") && last) MPI_Abort(MPI_COMM_WORLD, 7);
    if (!strcmp(what, "crash") && last) raise(SIGSEGV);
    if (!strcmp(what, "exit") && last) exit(3);
    if (!strcmp(what, "leave") && last) _exit(0);
    if (!strcmp(what, "wait")) { /* for the last one, which does not come */
        if (last) pause();
        MPI_Recv(&left, 1, MPI_INT, size - 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    if (!strcmp(what, "hang")) {
        signal(SIGTERM, SIG_IGN); /* and so does its child */
        if (fork() == 0) execlp("sleep", "sleep", "1000", (char *)NULL);
        for (;;) pause();
    }
    MPI_Finalize();
    return 0;
}
