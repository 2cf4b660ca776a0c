! The Alchemist-Library Interface for Fortran (2008), over alchemist.h: compile it together with
! alchemist_fortran.c, the gang's mpicc and your own files.
!
!     function scaled(call, in, out) bind(c) result(code)  ! B = factor * A, on every rank at once
!       type(c_ptr), value :: call
!       type(alchemist_value), intent(in) :: in(*)
!       type(alchemist_value), intent(inout) :: out(*)
!       integer(c_int) :: code
!       type(alchemist_matrix), pointer :: A, B
!       real(c_double), pointer :: from(:, :), to(:, :)
!       A => alchemist_matrix_of(in(1))
!       B => alchemist_new_like(call, A)
!       code = ALCHEMIST_FAILED_CODE
!       if (.not. associated(B)) return                   ! the host has recorded the cause
!       call alchemist_local(A, from)                     ! views of the gang's memory, no copies
!       call alchemist_local(B, to)
!       to = alchemist_number(in(2)) * from
!       call alchemist_set(out(1), B)
!       code = ALCHEMIST_OK
!     end function
!
!     function describe() bind(c, name="alchemist_library_describe") result(library)
!       type(c_ptr) :: library
!       type(c_ptr), save :: mine = c_null_ptr
!       if (.not. c_associated(mine)) then
!         mine = alchemist_library("mylib", "Purpose of the library.")
!         call alchemist_routine(mine, "scale", "B = factor * A.", scaled)
!         call alchemist_parameter(mine, "A", ALCHEMIST_MATRIX_TYPE, "of float64")
!         call alchemist_parameter(mine, "factor", ALCHEMIST_FLOAT_TYPE, "the factor", "2.0")
!         call alchemist_result(mine, "B", ALCHEMIST_MATRIX_TYPE, "in A's layout")
!       end if
!       library = alchemist_described(mine)
!     end function
!
! Return an error (alchemist_failed): STOP and ERROR STOP end the rank, and with it the gang.
! MPI: declare its C functions with bind(c), and give them alchemist_comm(call): the MPICH of pip has
! no Fortran modules ("MPI from Fortran" in docs/own-library.md). alchemist_allreduce and
! alchemist_exchange can be interrupted. A site's `mpi_f08` has comm%MPI_VAL = alchemist_comm(call).
module alchemist
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: error_unit
  implicit none
  private

  public :: c_ptr, c_int, c_int32_t, c_int64_t, c_float, c_double, c_bool
  public :: c_associated, c_null_ptr, c_loc, c_f_pointer, c_float_complex, c_double_complex
  public :: alchemist_matrix, alchemist_value
  public :: alchemist_library, alchemist_routine, alchemist_parameter, alchemist_result
  public :: alchemist_described, alchemist_closed_by, alchemist_state, alchemist_set_state
  public :: alchemist_sparse, alchemist_new_sparse, alchemist_start, alchemist_column, alchemist_set_start
  public :: alchemist_set_column, alchemist_sparse_of
  public :: alchemist_matrix_of, alchemist_integer, alchemist_number, alchemist_flag
  public :: alchemist_text, alchemist_numbers, alchemist_set, alchemist_give, alchemist_local
  public :: alchemist_rank, alchemist_size, alchemist_comm
  public :: alchemist_failed, alchemist_refused, alchemist_check, alchemist_progress
  public :: alchemist_span_begin, alchemist_span_end
  public :: alchemist_new, alchemist_new_vector, alchemist_new_like, alchemist_to_layout
  public :: alchemist_block_cyclic, alchemist_global_row, alchemist_global_col, alchemist_descriptor
  public :: alchemist_allreduce, alchemist_exchange, alchemist_attach, alchemist_create, alchemist_client_error

  integer(c_int), parameter, public :: ALCHEMIST_OK = 0, ALCHEMIST_FAILED_CODE = 1
  integer(c_int), parameter, public :: ALCHEMIST_ENDED = 2

  ! Types of parameters and results, for alchemist_integer, _number, _flag, _text, _numbers. Others
  ! are in the members of alchemist_value, as in alchemist.h.
  integer(c_int), parameter, public :: ALCHEMIST_MATRIX_TYPE = 1, ALCHEMIST_INT_TYPE = 2, &
      ALCHEMIST_FLOAT_TYPE = 3, ALCHEMIST_BOOL_TYPE = 4, ALCHEMIST_STRING_TYPE = 5, &
      ALCHEMIST_FLOATS_TYPE = 8, ALCHEMIST_SPARSE_TYPE = 11, &
      ALCHEMIST_MATRIX_READ_TYPE = 257, ALCHEMIST_MATRIX_WRITTEN_TYPE = 513  ! parameters only

  integer(c_int), parameter, public :: ALCHEMIST_FLOAT32 = 1, ALCHEMIST_FLOAT64 = 2, &
      ALCHEMIST_COMPLEX64 = 3, ALCHEMIST_COMPLEX128 = 4, ALCHEMIST_INT32 = 5, &
      ALCHEMIST_INT64 = 6, ALCHEMIST_BOOL8 = 7, ALCHEMIST_INT8 = 8, ALCHEMIST_INT16 = 9, &
      ALCHEMIST_UINT8 = 10, ALCHEMIST_UINT16 = 11, ALCHEMIST_UINT32 = 12, ALCHEMIST_UINT64 = 13, &
      ALCHEMIST_FLOAT16 = 14, &
      ALCHEMIST_ANY = 0  ! for alchemist_attach, also as layout

  integer(c_int), parameter, public :: ALCHEMIST_MC_MR = 1, ALCHEMIST_MC_STAR = 2, &
      ALCHEMIST_MD_STAR = 3, ALCHEMIST_MR_MC = 4, ALCHEMIST_MR_STAR = 5, ALCHEMIST_STAR_MC = 6, &
      ALCHEMIST_STAR_MD = 7, ALCHEMIST_STAR_MR = 8, ALCHEMIST_STAR_STAR = 9, &
      ALCHEMIST_STAR_VC = 10, ALCHEMIST_STAR_VR = 11, ALCHEMIST_VC_STAR = 12, &
      ALCHEMIST_VR_STAR = 13, ALCHEMIST_CIRC_CIRC = 14, ALCHEMIST_BLOCK = 2147483393, &
      ALCHEMIST_ROW_BLOCKS = 2147483404  ! whole rows, one block for each rank: ceil(rows / size)

  integer(c_int), parameter, public :: ALCHEMIST_SUM = 1, ALCHEMIST_MIN = 2, ALCHEMIST_MAX = 3

  ! One rank's part of a matrix: element (i, j) of its local array (from 1) is element
  ! (alchemist_global_row(matrix, i), alchemist_global_col(matrix, j)) of the matrix (from 0).
  type, bind(c) :: alchemist_matrix
    integer(c_int64_t) :: rows, cols
    integer(c_int) :: dtype, layout
    integer(c_int32_t) :: grid_height, grid_width, dimensions
    integer(c_int64_t) :: local_rows, local_cols, leading_dimension
    integer(c_int64_t) :: row_shift, row_stride, col_shift, col_stride, row_block, col_block
    type(c_ptr) :: data
  end type

  ! One rank's rows of a sparse matrix, those that it has of a dense one in ALCHEMIST_ROW_BLOCKS:
  ! alchemist_start and alchemist_column read where elements are, all numbers from 0 as in C, and
  ! call c_f_pointer(A%data, values, [A%local_elements]) gives them. Arguments are read-only.
  type, bind(c) :: alchemist_sparse
    integer(c_int64_t) :: rows, cols, elements
    integer(c_int) :: dtype, index
    integer(c_int64_t) :: first_row, local_rows, local_elements
    type(c_ptr) :: starts, columns, data
  end type

  ! An argument or a result. `given` is 0 for an optional argument that was left out.
  type, bind(c) :: alchemist_value
    integer(c_int32_t) :: given
    integer(c_int64_t) :: count
    integer(c_int64_t) :: words(2)
  end type

  ! A routine: in has one value per parameter, out one per result.
  abstract interface
    integer(c_int) function alchemist_function(call, in, out) bind(c) result(code)
      import
      type(c_ptr), value :: call
      type(alchemist_value), intent(in) :: in(*)
      type(alchemist_value), intent(inout) :: out(*)
    end function
    subroutine alchemist_close(state) bind(c)
      import
      type(c_ptr), value :: state
    end subroutine
  end interface

  ! call alchemist_local(A, array): the local elements, a pointer to a matrix of A's dtype; another
  ! type ends the rank. A rank without elements gets an array with 0 rows or columns.
  interface alchemist_local
    module procedure local_float32, local_float64, local_complex64, local_complex128
    module procedure local_int32, local_int64, local_int8, local_int16  ! also others of the size
  end interface

  ! call alchemist_set(out(1), x): a matrix on every rank; a number or logical on rank 0.
  interface alchemist_set
    module procedure set_matrix, set_sparse, set_number, set_integer, set_flag
  end interface

  ! code = alchemist_give(call, out(1), x): a list of numbers or a text, which is copied.
  interface alchemist_give
    module procedure give_numbers, give_text
  end interface

  ! code = alchemist_allreduce(call, values, ALCHEMIST_SUM): a wait that ends with the call.
  interface alchemist_allreduce
    module procedure allreduce_numbers, allreduce_integers
  end interface

  interface
    type(c_ptr) function f_new_library(name, doc) &
        bind(c, name="alchemist_f_new_library") result(library)
      import
      character(kind=c_char), intent(in) :: name(*), doc(*)
    end function
    subroutine f_add_routine(library, name, doc, run) bind(c, name="alchemist_f_add_routine")
      import
      type(c_ptr), value :: library
      character(kind=c_char), intent(in) :: name(*), doc(*)
      type(c_funptr), value :: run
    end subroutine
    subroutine f_add_parameter(library, name, kind, doc, default) &
        bind(c, name="alchemist_f_add_parameter")
      import
      type(c_ptr), value :: library
      character(kind=c_char), intent(in) :: name(*), doc(*), default(*)
      integer(c_int), value :: kind
    end subroutine
    subroutine f_add_result(library, name, kind, doc) bind(c, name="alchemist_f_add_result")
      import
      type(c_ptr), value :: library
      character(kind=c_char), intent(in) :: name(*), doc(*)
      integer(c_int), value :: kind
    end subroutine
    subroutine f_set_close(library, close) bind(c, name="alchemist_f_set_close")
      import
      type(c_ptr), value :: library
      type(c_funptr), value :: close
    end subroutine
    type(c_ptr) function alchemist_described(library) &
        bind(c, name="alchemist_f_described") result(raw)
      import
      type(c_ptr), value :: library
    end function
    integer(c_int) function alchemist_rank(call) bind(c, name="alchemist_f_rank") result(rank)
      import
      type(c_ptr), value :: call
    end function
    integer(c_int) function alchemist_size(call) bind(c, name="alchemist_f_size") result(ranks)
      import
      type(c_ptr), value :: call
    end function
    ! The library's own pointer, null at first, kept from call to call: one per session and rank.
    type(c_ptr) function alchemist_state(call) bind(c, name="alchemist_f_state") result(state)
      import
      type(c_ptr), value :: call
    end function
    subroutine alchemist_set_state(call, state) bind(c, name="alchemist_f_set_state")
      import
      type(c_ptr), value :: call, state
    end subroutine
    type(c_ptr) function f_allocate(call, nbytes) &
        bind(c, name="alchemist_f_allocate") result(memory)
      import
      type(c_ptr), value :: call
      integer(c_size_t), value :: nbytes
    end function
    ! For MPI's Fortran interfaces: the gang's communicator. Read it in each call.
    integer(c_int) function alchemist_comm(call) bind(c, name="alchemist_f_comm") result(comm)
      import
      type(c_ptr), value :: call
    end function
    integer(c_int) function f_fail(call, kind, message) &
        bind(c, name="alchemist_f_fail") result(code)
      import
      type(c_ptr), value :: call
      integer(c_int), value :: kind
      character(kind=c_char), intent(in) :: message(*)
    end function
    ! In long loops: code = alchemist_check(call); if (code /= ALCHEMIST_OK) return
    integer(c_int) function alchemist_check(call) bind(c, name="alchemist_check") result(code)
      import
      type(c_ptr), value :: call
    end function
    subroutine f_progress(call, fraction, text) bind(c, name="alchemist_progress")
      import
      type(c_ptr), value :: call
      real(c_double), value :: fraction
      character(kind=c_char), intent(in) :: text(*)
    end subroutine
    subroutine f_span_begin(call, name) bind(c, name="alchemist_span_begin")
      import
      type(c_ptr), value :: call
      character(kind=c_char), intent(in) :: name(*)
    end subroutine
    ! Ends the span that was begun last.
    subroutine alchemist_span_end(call) bind(c, name="alchemist_span_end")
      import
      type(c_ptr), value :: call
    end subroutine
    type(c_ptr) function f_new(call, rows, cols, dtype, layout) &
        bind(c, name="alchemist_new") result(made)
      import
      type(c_ptr), value :: call
      integer(c_int64_t), value :: rows, cols
      integer(c_int), value :: dtype, layout
    end function
    type(c_ptr) function f_new_like(call, like) bind(c, name="alchemist_new_like") result(made)
      import
      type(c_ptr), value :: call
      type(alchemist_matrix), intent(in) :: like
    end function
    type(c_ptr) function f_to_layout(call, matrix, layout) &
        bind(c, name="alchemist_to_layout") result(made)
      import
      type(c_ptr), value :: call
      type(alchemist_matrix), intent(in) :: matrix
      integer(c_int), value :: layout
    end function
    type(c_ptr) function f_new_sparse(call, rows, cols, local_elements, dtype) &
        bind(c, name="alchemist_new_sparse") result(made)
      import
      type(c_ptr), value :: call
      integer(c_int64_t), value :: rows, cols, local_elements
      integer(c_int), value :: dtype
    end function
    integer(c_int64_t) function alchemist_start(matrix, row) bind(c) result(start)
      import
      type(alchemist_sparse), intent(in) :: matrix
      integer(c_int64_t), value :: row
    end function
    integer(c_int64_t) function alchemist_column(matrix, element) bind(c) result(column)
      import
      type(alchemist_sparse), intent(in) :: matrix
      integer(c_int64_t), value :: element
    end function
    subroutine alchemist_set_start(matrix, row, start) bind(c)
      import
      type(alchemist_sparse), intent(in) :: matrix
      integer(c_int64_t), value :: row, start
    end subroutine
    subroutine alchemist_set_column(matrix, element, column) bind(c)
      import
      type(alchemist_sparse), intent(in) :: matrix
      integer(c_int64_t), value :: element, column
    end subroutine
    integer(c_int) function f_allreduce(call, values, count, kind, operation) &
        bind(c, name="alchemist_f_allreduce") result(code)
      import
      type(c_ptr), value :: call, values
      integer(c_int), value :: count, kind, operation
    end function
    integer(c_int) function f_exchange(call, out, to, in, from, count) &
        bind(c, name="alchemist_f_exchange") result(code)
      import
      type(c_ptr), value :: call, out, in
      integer(c_int), value :: to, from, count
    end function
    integer(c_int) function f_attach(name, dtype, layout, matrix) &
        bind(c, name="alchemist_attach") result(code)
      import
      character(kind=c_char), intent(in) :: name(*)
      integer(c_int32_t), value :: dtype, layout
      type(alchemist_matrix), intent(out) :: matrix
    end function
    integer(c_int) function f_create(name, rows, cols, dimensions, dtype, layout, matrix) &
        bind(c, name="alchemist_create") result(code)
      import
      character(kind=c_char), intent(in) :: name(*)
      integer(c_int64_t), value :: rows, cols
      integer(c_int), value :: dimensions, dtype, layout
      type(alchemist_matrix), intent(out) :: matrix
    end function
    type(c_ptr) function f_client_error() bind(c, name="alchemist_client_error") result(text)
      import
    end function
    integer(c_size_t) function c_strlen(text) bind(c, name="strlen") result(length)
      import
      type(c_ptr), value :: text
    end function
  end interface

contains

  ! --- the description of a library: each parameter and result belongs to the last routine ---

  type(c_ptr) function alchemist_library(name, doc) result(library)
    character(*), intent(in) :: name, doc
    library = f_new_library(name // c_null_char, doc // c_null_char)
  end function

  subroutine alchemist_routine(library, name, doc, run)
    type(c_ptr), intent(in) :: library
    character(*), intent(in) :: name, doc
    procedure(alchemist_function) :: run
    call f_add_routine(library, name // c_null_char, doc // c_null_char, c_funloc(run))
  end subroutine

  ! The subroutine gets the state of a rank when the library is closed.
  subroutine alchemist_closed_by(library, close)
    type(c_ptr), intent(in) :: library
    procedure(alchemist_close) :: close
    call f_set_close(library, c_funloc(close))
  end subroutine

  ! default: JSON, as in alchemist.h; without it the argument is required.
  subroutine alchemist_parameter(library, name, kind, doc, default)
    type(c_ptr), intent(in) :: library
    character(*), intent(in) :: name, doc
    integer(c_int), intent(in) :: kind
    character(*), intent(in), optional :: default
    if (present(default)) then
      call f_add_parameter(library, name // c_null_char, kind, doc // c_null_char, &
                           default // c_null_char)
    else
      call f_add_parameter(library, name // c_null_char, kind, doc // c_null_char, c_null_char)
    end if
  end subroutine

  subroutine alchemist_result(library, name, kind, doc)
    type(c_ptr), intent(in) :: library
    character(*), intent(in) :: name, doc
    integer(c_int), intent(in) :: kind
    call f_add_result(library, name // c_null_char, kind, doc // c_null_char)
  end subroutine

  ! --- arguments and results ---

  function alchemist_matrix_of(value) result(matrix)
    type(alchemist_value), intent(in) :: value
    type(alchemist_matrix), pointer :: matrix
    call c_f_pointer(transfer(value%words(1), c_null_ptr), matrix)
  end function

  function alchemist_sparse_of(value) result(matrix)
    type(alchemist_value), intent(in) :: value
    type(alchemist_sparse), pointer :: matrix
    call c_f_pointer(transfer(value%words(1), c_null_ptr), matrix)
  end function

  integer(c_int64_t) function alchemist_integer(value) result(x)
    type(alchemist_value), intent(in) :: value
    x = value%words(1)
  end function

  real(c_double) function alchemist_number(value) result(x)
    type(alchemist_value), intent(in) :: value
    x = transfer(value%words(1), x)
  end function

  logical function alchemist_flag(value) result(x)
    type(alchemist_value), intent(in) :: value
    x = iand(value%words(1), int(z'FFFFFFFF', c_int64_t)) /= 0
  end function

  function alchemist_text(value) result(x)
    type(alchemist_value), intent(in) :: value
    character(:), allocatable :: x
    x = text_at(transfer(value%words(1), c_null_ptr))
  end function

  function text_at(place) result(x)
    type(c_ptr), intent(in) :: place
    character(:), allocatable :: x
    character(kind=c_char), pointer :: letters(:)
    integer :: i
    call c_f_pointer(place, letters, [c_strlen(place)])
    allocate (character(size(letters)) :: x)
    do i = 1, size(letters)
      x(i:i) = letters(i)
    end do
  end function

  function alchemist_numbers(value) result(x)
    type(alchemist_value), intent(in) :: value
    real(c_double), pointer :: x(:)
    call c_f_pointer(transfer(value%words(1), c_null_ptr), x, [value%count])
  end function

  integer(c_int) function give_numbers(call, value, x) result(code)
    type(c_ptr), intent(in) :: call
    type(alchemist_value), intent(inout) :: value
    real(c_double), intent(in) :: x(:)
    type(c_ptr) :: memory
    real(c_double), pointer :: copy(:)
    memory = f_allocate(call, 8 * size(x, kind=c_size_t))
    code = ALCHEMIST_FAILED_CODE
    if (.not. c_associated(memory)) return
    call c_f_pointer(memory, copy, [size(x)])
    copy = x
    value%words(1) = transfer(memory, value%words(1))
    value%count = size(x)
    code = ALCHEMIST_OK
  end function

  integer(c_int) function give_text(call, value, x) result(code)
    type(c_ptr), intent(in) :: call
    type(alchemist_value), intent(inout) :: value
    character(*), intent(in) :: x
    type(c_ptr) :: memory
    character(kind=c_char), pointer :: copy(:)
    memory = f_allocate(call, len(x, kind=c_size_t) + 1)  ! of zero bytes
    code = ALCHEMIST_FAILED_CODE
    if (.not. c_associated(memory)) return
    call c_f_pointer(memory, copy, [len(x)])
    copy = transfer(x, copy)
    value%words(1) = transfer(memory, value%words(1))
    code = ALCHEMIST_OK
  end function

  subroutine set_matrix(value, x)
    type(alchemist_value), intent(inout) :: value
    type(alchemist_matrix), intent(in), target :: x
    value%words(1) = transfer(c_loc(x), value%words(1))
  end subroutine

  subroutine set_sparse(value, x)
    type(alchemist_value), intent(inout) :: value
    type(alchemist_sparse), intent(in), target :: x
    value%words(1) = transfer(c_loc(x), value%words(1))
  end subroutine

  subroutine set_number(value, x)
    type(alchemist_value), intent(inout) :: value
    real(c_double), intent(in) :: x
    value%words(1) = transfer(x, value%words(1))
  end subroutine

  subroutine set_integer(value, x)
    type(alchemist_value), intent(inout) :: value
    integer(c_int64_t), intent(in) :: x
    value%words(1) = x
  end subroutine

  subroutine set_flag(value, x)
    type(alchemist_value), intent(inout) :: value
    logical, intent(in) :: x
    value%words(1) = merge(1_c_int64_t, 0_c_int64_t, x)
  end subroutine

  ! --- local elements: without gaps, as the host stores them ---

  ! A pointer of another type would give wrong numbers, or leave the matrix's memory.
  subroutine expect(A, array, dtypes)
    type(alchemist_matrix), intent(in) :: A
    character(*), intent(in) :: array
    integer(c_int), intent(in) :: dtypes(:)
    if (any(A%dtype == dtypes)) return
    write (error_unit, "(3a, i0, a)") "alchemist_local: the array is of ", array, &
        ", and the matrix has dtype ", A%dtype, ": compare A%dtype with ALCHEMIST_... before"
    error stop 1
  end subroutine

  subroutine local_float32(A, array)
    type(alchemist_matrix), intent(in) :: A
    real(c_float), pointer, intent(out) :: array(:, :)
    call expect(A, "float32", [ALCHEMIST_FLOAT32])
    call c_f_pointer(A%data, array, [A%local_rows, A%local_cols])
  end subroutine

  subroutine local_float64(A, array)
    type(alchemist_matrix), intent(in) :: A
    real(c_double), pointer, intent(out) :: array(:, :)
    call expect(A, "float64", [ALCHEMIST_FLOAT64])
    call c_f_pointer(A%data, array, [A%local_rows, A%local_cols])
  end subroutine

  subroutine local_complex64(A, array)
    type(alchemist_matrix), intent(in) :: A
    complex(c_float_complex), pointer, intent(out) :: array(:, :)
    call expect(A, "complex64", [ALCHEMIST_COMPLEX64])
    call c_f_pointer(A%data, array, [A%local_rows, A%local_cols])
  end subroutine

  subroutine local_complex128(A, array)
    type(alchemist_matrix), intent(in) :: A
    complex(c_double_complex), pointer, intent(out) :: array(:, :)
    call expect(A, "complex128", [ALCHEMIST_COMPLEX128])
    call c_f_pointer(A%data, array, [A%local_rows, A%local_cols])
  end subroutine

  subroutine local_int32(A, array)
    type(alchemist_matrix), intent(in) :: A
    integer(c_int32_t), pointer, intent(out) :: array(:, :)
    call expect(A, "int32", [ALCHEMIST_INT32, ALCHEMIST_UINT32])
    call c_f_pointer(A%data, array, [A%local_rows, A%local_cols])
  end subroutine

  subroutine local_int8(A, array)
    type(alchemist_matrix), intent(in) :: A
    integer(c_int8_t), pointer, intent(out) :: array(:, :)
    call expect(A, "int8", [ALCHEMIST_INT8, ALCHEMIST_UINT8, ALCHEMIST_BOOL8])
    call c_f_pointer(A%data, array, [A%local_rows, A%local_cols])
  end subroutine

  subroutine local_int16(A, array)
    type(alchemist_matrix), intent(in) :: A
    integer(c_int16_t), pointer, intent(out) :: array(:, :)
    call expect(A, "int16", [ALCHEMIST_INT16, ALCHEMIST_UINT16, ALCHEMIST_FLOAT16])
    call c_f_pointer(A%data, array, [A%local_rows, A%local_cols])
  end subroutine

  subroutine local_int64(A, array)
    type(alchemist_matrix), intent(in) :: A
    integer(c_int64_t), pointer, intent(out) :: array(:, :)
    call expect(A, "int64", [ALCHEMIST_INT64, ALCHEMIST_UINT64])
    call c_f_pointer(A%data, array, [A%local_rows, A%local_cols])
  end subroutine

  ! --- a call ---

  ! return value of a routine that has failed: code = alchemist_failed(call, "no convergence")
  integer(c_int) function alchemist_failed(call, message) result(code)
    type(c_ptr), intent(in) :: call
    character(*), intent(in) :: message
    code = f_fail(call, 0, message // c_null_char)
  end function

  ! The same for bad arguments. Check values that all ranks see, before the first message.
  integer(c_int) function alchemist_refused(call, message) result(code)
    type(c_ptr), intent(in) :: call
    character(*), intent(in) :: message
    code = f_fail(call, 1, message // c_null_char)
  end function

  subroutine alchemist_progress(call, fraction, text)
    type(c_ptr), intent(in) :: call
    real(c_double), intent(in) :: fraction
    character(*), intent(in) :: text
    call f_progress(call, fraction, text // c_null_char)
  end subroutine

  ! Mark a part of the routine for als.trace, until alchemist_span_end.
  subroutine alchemist_span_begin(call, name)
    type(c_ptr), intent(in) :: call
    character(*), intent(in) :: name
    call f_span_begin(call, name // c_null_char)
  end subroutine

  ! A matrix of zeros, or null if the host has failed. Every rank passes the same arguments.
  function alchemist_new(call, rows, cols, dtype, layout) result(made)
    type(c_ptr), intent(in) :: call
    integer(c_int64_t), intent(in) :: rows, cols
    integer(c_int), intent(in) :: dtype, layout
    type(alchemist_matrix), pointer :: made
    call c_f_pointer(f_new(call, rows, cols, dtype, layout), made)
  end function

  ! A sparse matrix, whose arrays each rank fills; not associated if the call must end.
  function alchemist_new_sparse(call, rows, cols, local_elements, dtype) result(made)
    type(c_ptr), intent(in) :: call
    integer(c_int64_t), intent(in) :: rows, cols, local_elements
    integer(c_int), intent(in) :: dtype
    type(alchemist_sparse), pointer :: made
    call c_f_pointer(f_new_sparse(call, rows, cols, local_elements, dtype), made)
  end function

  ! ScaLAPACK's block-cyclic layout with nb x nb blocks, nb >= 2.
  pure integer(c_int) function alchemist_block_cyclic(nb) result(layout)
    integer, intent(in) :: nb
    layout = ALCHEMIST_MC_MR + 256_c_int * int(nb, c_int)
  end function

  ! The row of the matrix (from 0) in row i of the local array (from 1).
  pure integer(c_int64_t) function alchemist_global_row(matrix, i) result(row)
    type(alchemist_matrix), intent(in) :: matrix
    integer(c_int64_t), intent(in) :: i
    row = matrix%row_shift + (i - 1) / matrix%row_block * matrix%row_stride &
        + modulo(i - 1, matrix%row_block)
  end function

  pure integer(c_int64_t) function alchemist_global_col(matrix, j) result(col)
    type(alchemist_matrix), intent(in) :: matrix
    integer(c_int64_t), intent(in) :: j
    col = matrix%col_shift + (j - 1) / matrix%col_block * matrix%col_stride &
        + modulo(j - 1, matrix%col_block)
  end function

  ! ScaLAPACK's descriptor of a matrix in MC_MR, BLOCK or block-cyclic; the grid of `context` is
  ! that of blacs_gridinit(context, "C", height, width). False for other layouts.
  logical function alchemist_descriptor(matrix, context, descriptor) result(found)
    type(alchemist_matrix), intent(in) :: matrix
    integer, intent(in) :: context
    integer, intent(out) :: descriptor(9)
    found = modulo(matrix%layout, 256_c_int) == ALCHEMIST_MC_MR
    descriptor = [1, context, int(matrix%rows), int(matrix%cols), int(matrix%row_block), &
        int(matrix%col_block), 0, 0, max(1, int(matrix%local_rows))]
  end function

  function alchemist_new_vector(call, rows, dtype, layout) result(made)
    type(c_ptr), intent(in) :: call
    integer(c_int64_t), intent(in) :: rows
    integer(c_int), intent(in) :: dtype, layout
    type(alchemist_matrix), pointer :: made
    made => alchemist_new(call, rows, 1_c_int64_t, dtype, layout)
    if (associated(made)) made%dimensions = 1
  end function

  function alchemist_new_like(call, like) result(made)
    type(c_ptr), intent(in) :: call
    type(alchemist_matrix), intent(in) :: like
    type(alchemist_matrix), pointer :: made
    call c_f_pointer(f_new_like(call, like), made)
  end function

  function alchemist_to_layout(call, matrix, layout) result(made)
    type(c_ptr), intent(in) :: call
    type(alchemist_matrix), intent(in) :: matrix
    integer(c_int), intent(in) :: layout
    type(alchemist_matrix), pointer :: made
    call c_f_pointer(f_to_layout(call, matrix, layout), made)
  end function

  integer(c_int) function allreduce_numbers(call, values, operation) result(code)
    type(c_ptr), intent(in) :: call
    real(c_double), intent(inout), target, contiguous :: values(:)
    integer(c_int), intent(in) :: operation
    code = f_allreduce(call, c_loc(values), size(values, kind=c_int), 0, operation)
  end function

  integer(c_int) function allreduce_integers(call, values, operation) result(code)
    type(c_ptr), intent(in) :: call
    integer(c_int64_t), intent(inout), target, contiguous :: values(:)
    integer(c_int), intent(in) :: operation
    code = f_allreduce(call, c_loc(values), size(values, kind=c_int), 1, operation)
  end function

  ! Sends numbers to one rank and receives as many from another: the edges of a stencil's blocks. A
  ! rank outside of 0 to size - 1 is no neighbour, and `in` stays as it is. A wait that ends with
  ! the call.
  integer(c_int) function alchemist_exchange(call, out, to, in, from) result(code)
    type(c_ptr), intent(in) :: call
    real(c_double), intent(in), target, contiguous :: out(:)
    real(c_double), intent(inout), target, contiguous :: in(:)
    integer(c_int), intent(in) :: to, from
    if (size(in) /= size(out)) then
      code = alchemist_failed(call, "alchemist_exchange: in and out differ in length")
      return
    end if
    code = f_exchange(call, c_loc(out), to, c_loc(in), from, size(out, kind=c_int))
  end function

  ! --- programs that als.run_program has started (alchemist_client.h) ---

  ! dtype and layout: those that the program expects; another one is refused.
  integer(c_int) function alchemist_attach(name, dtype, layout, matrix) result(code)
    character(*), intent(in) :: name
    integer, intent(in) :: dtype, layout
    type(alchemist_matrix), intent(out) :: matrix
    code = f_attach(name // c_null_char, int(dtype, c_int32_t), int(layout, c_int32_t), matrix)
  end function

  integer(c_int) function alchemist_create(name, rows, cols, dimensions, dtype, layout, matrix) &
      result(code)
    character(*), intent(in) :: name
    integer(c_int64_t), intent(in) :: rows, cols
    integer(c_int), intent(in) :: dimensions, dtype, layout
    type(alchemist_matrix), intent(out) :: matrix
    code = f_create(name // c_null_char, rows, cols, dimensions, dtype, layout, matrix)
  end function

  function alchemist_client_error() result(text)
    character(:), allocatable :: text
    text = text_at(f_client_error())
  end function
end module
