! Waits in MPI for rank 1, in Fortran, by the C functions of MPI ("MPI from Fortran" in
! docs/own-library.md).
module waiting_calls
  use iso_c_binding
  implicit none
  integer(c_int), parameter :: DOUBLE = int(z'4c00080b', c_int), SUM = int(z'58000003', c_int)
  integer(c_int), parameter :: NULL_REQUEST = int(z'2c000000', c_int), NULL_INFO = int(z'1c000000', c_int)

  interface
    integer(c_int) function MPI_Allreduce(a, b, n, t, o, c) bind(c, name="MPI_Allreduce")
      import
      real(c_double) :: a(*), b(*)
      integer(c_int), value :: n, t, o, c
    end function
    integer(c_int) function MPI_Allreduce_c(a, b, n, t, o, c) bind(c, name="MPI_Allreduce_c")
      import
      real(c_double) :: a(*), b(*)
      integer(c_int64_t), value :: n
      integer(c_int), value :: t, o, c
    end function
    integer(c_int) function MPI_Bcast(a, n, t, root, c) bind(c, name="MPI_Bcast")
      import
      real(c_double) :: a(*)
      integer(c_int), value :: n, t, root, c
    end function
    integer(c_int) function MPI_Barrier(c) bind(c, name="MPI_Barrier")
      import
      integer(c_int), value :: c
    end function
    integer(c_int) function MPI_Recv(a, n, t, from, tag, c, status) bind(c, name="MPI_Recv")
      import
      real(c_double) :: a(*)
      integer(c_int), value :: n, t, from, tag, c
      integer(c_int) :: status(*)
    end function
    integer(c_int) function MPI_Irecv(a, n, t, from, tag, c, request) bind(c, name="MPI_Irecv")
      import
      real(c_double) :: a(*)
      integer(c_int), value :: n, t, from, tag, c
      integer(c_int) :: request
    end function
    integer(c_int) function MPI_Wait(request, status) bind(c, name="MPI_Wait")
      import
      integer(c_int) :: request, status(*)
    end function
    integer(c_int) function MPI_Waitall(n, requests, statuses) bind(c, name="MPI_Waitall")
      import
      integer(c_int), value :: n
      integer(c_int) :: requests(*), statuses(*)
    end function
    integer(c_int) function MPI_Probe(from, tag, c, status) bind(c, name="MPI_Probe")
      import
      integer(c_int), value :: from, tag, c
      integer(c_int) :: status(*)
    end function
    integer(c_int) function MPI_Alltoallv(a, ns, ds, t, b, ms, es, u, c) bind(c, name="MPI_Alltoallv")
      import
      real(c_double) :: a(*), b(*)
      integer(c_int) :: ns(*), ds(*), ms(*), es(*)
      integer(c_int), value :: t, u, c
    end function
    integer(c_int) function MPI_Win_create(a, n, unit, info, c, w) bind(c, name="MPI_Win_create")
      import
      real(c_double) :: a(*)
      integer(c_long), value :: n
      integer(c_int), value :: unit, info, c
      integer(c_int) :: w
    end function
  end interface
contains
  integer(c_int) function waited(how, length, c, size) bind(c, name="waited_in_fortran")
    integer(c_int), value :: length, c, size
    character(kind=c_char), intent(in) :: how(length)
    real(c_double), save :: x(64), y(64)
    integer(c_int) :: status(10), requests(2), counts(64), places(64), w, i
    character(length) :: name
    do i = 1, length
      name(i:i) = how(i)
    end do
    counts(:size) = 1
    places(:size) = [(i - 1, i = 1, size)]
    select case (name)
    case ("Allreduce")
      waited = MPI_Allreduce(x, y, 3, DOUBLE, SUM, c)
    case ("Allreduce_c")
      waited = MPI_Allreduce_c(x, y, 3_c_int64_t, DOUBLE, SUM, c)
    case ("Bcast")
      waited = MPI_Bcast(x, 3, DOUBLE, 1, c)
    case ("Barrier")
      waited = MPI_Barrier(c)
    case ("Recv")
      waited = MPI_Recv(x, 3, DOUBLE, 1, 0, c, status)
    case ("Probe")
      waited = MPI_Probe(1, 0, c, status)
    case ("Alltoallv")
      waited = MPI_Alltoallv(x, counts, places, DOUBLE, y, counts, places, DOUBLE, c)
    case ("Win_fence")
      waited = MPI_Win_create(x, 8_c_long, 8, NULL_INFO, c, w)
    case default
      requests = NULL_REQUEST
      waited = MPI_Irecv(x, 1, DOUBLE, 1, 0, c, requests(1))
      if (name == "Wait") then
        waited = MPI_Wait(requests(1), status)
      else
        waited = MPI_Waitall(1, requests, status)
      end if
    end select
  end function
end module
