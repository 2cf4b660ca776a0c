/* A client for MPI programs (C11 and C++) that AlchemistSession.run_program starts: it attaches to
 * the session's matrices by name, and creates new ones. Nothing is copied: `data` of a matrix is the
 * memory of the gang's rank with the number of this process.
 *
 *     MPI_Init(&argc, &argv);
 *     alchemist_matrix A, B;
 *     if (alchemist_attach("A", ALCHEMIST_FLOAT64, ALCHEMIST_VC_STAR, &A) ||
 *         alchemist_create("B", A.rows, 1, 1, ALCHEMIST_FLOAT64, ALCHEMIST_VC_STAR, &B)) {
 *         fprintf(stderr, "%s\n", alchemist_client_error());
 *         MPI_Abort(MPI_COMM_WORLD, 1);
 *     }
 *
 *     result = als.run_program(["./program"], matrices={"A": A});  B = result.matrices["B"]
 *
 * Link with MPI only. Outside of run_program every function fails, with a message.
 */
#ifndef ALCHEMIST_CLIENT_H
#define ALCHEMIST_CLIENT_H

#include <errno.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "alchemist.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ALCHEMIST_CLIENT_VERSION = 2 };

/* For alchemist_attach: the program handles any dtype, or any layout, as the matrix tells it. */
enum { ALCHEMIST_ANY = 0 };

struct alchemist_client_request {
    int32_t version, operation, dtype, layout, dimensions;
    int64_t rows, cols;
    char name[128];
};

struct alchemist_client_reply {
    int32_t failed;
    int64_t nbytes;
    alchemist_matrix matrix;
    char message[512];
};

static char alchemist_client_message[600] = "no error";

/* Why the last function of this file has failed. */
ALCHEMIST_API const char *alchemist_client_error(void) { return alchemist_client_message; }

ALCHEMIST_API int alchemist_client_fail(const char *name, const char *why) {
    snprintf(alchemist_client_message, sizeof alchemist_client_message, "matrix %s: %s", name, why);
    return ALCHEMIST_FAILED;
}

/* Receives a reply and, if there is one, the descriptor of the matrix's memory. */
ALCHEMIST_API ssize_t alchemist_client_receive(int fd, struct alchemist_client_reply *reply,
                                               int *memory) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {reply, sizeof *reply};
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    ssize_t received;
    do received = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    while (received < 0 && errno == EINTR);
    struct cmsghdr *header = received > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    *memory = -1;
    if (header != NULL && header->cmsg_type == SCM_RIGHTS)
        memcpy(memory, CMSG_DATA(header), sizeof(int));
    return received;
}

ALCHEMIST_API int alchemist_client_ask(struct alchemist_client_request *request, const char *name,
                                       alchemist_matrix *matrix) {
    const char *number = getenv("ALCHEMIST_CLIENT_FD");
    if (number == NULL)
        return alchemist_client_fail(name, "this program was not started by run_program");
    if (strlen(name) >= sizeof request->name)
        return alchemist_client_fail(name, "the name has more than 127 bytes");
    strcpy(request->name, name);
    request->version = ALCHEMIST_CLIENT_VERSION;
    int fd = atoi(number), memory = -1;
    struct alchemist_client_reply reply;
    if (send(fd, request, sizeof *request, MSG_NOSIGNAL) != (ssize_t)sizeof *request ||
        alchemist_client_receive(fd, &reply, &memory) != (ssize_t)sizeof reply)
        return alchemist_client_fail(name, "the connection to the gang's rank has ended");
    if (reply.failed) return alchemist_client_fail(name, reply.message);
    void *data =
        mmap(NULL, (size_t)reply.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    close(memory);
    if (data == MAP_FAILED) return alchemist_client_fail(name, strerror(errno));
    *matrix = reply.matrix;
    matrix->data = data;
    return ALCHEMIST_OK;
}

/* This process's part of a matrix of the session, which must have this dtype and layout: another
 * one is refused, because its elements would be read wrongly. It stays mapped until the process
 * ends; elements that are written are the session's at once. */
ALCHEMIST_API int alchemist_attach(const char *name, int32_t dtype, int32_t layout,
                                   alchemist_matrix *matrix) {
    struct alchemist_client_request request;
    memset(&request, 0, sizeof request);
    request.operation = 1;
    request.dtype = dtype;
    request.layout = layout;
    return alchemist_client_ask(&request, name, matrix);
}

/* A new matrix of zeros; dimensions 1 makes a vector (cols is then 1). Every process makes the same
 * calls; the session gets the matrix when the program has ended without an error. */
ALCHEMIST_API int alchemist_create(const char *name, int64_t rows, int64_t cols, int32_t dimensions,
                                   alchemist_dtype dtype, alchemist_layout layout,
                                   alchemist_matrix *matrix) {
    struct alchemist_client_request request;
    memset(&request, 0, sizeof request);
    request.operation = 2;
    request.rows = rows;
    request.cols = cols;
    request.dimensions = dimensions;
    request.dtype = dtype;
    request.layout = layout;
    return alchemist_client_ask(&request, name, matrix);
}

#ifdef __cplusplus
}
#endif
#endif
