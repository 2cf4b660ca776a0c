/** Routines of the shipped library `linalg`, wrapped as in the paper's listing. */
package alchemist.linalg

import alchemist.AlMatrix

private[linalg] object Linalg {
  /** The library stays loaded, so that loading it again takes one round trip. */
  def run(matrix: AlMatrix, routine: String, args: Any*): Array[Any] = {
    val context = matrix.context
    context.registerLibrary("linalg")
    context.run("linalg", routine, matrix +: args: _*)
  }
}

/** C = A B. */
object GEMM {
  def apply(A: AlMatrix, B: AlMatrix): AlMatrix = Linalg.run(A, "matmul", B) match {
    case Array(c: AlMatrix) => c
  }
}

/** A is approximately U diag(s) V^T, with MLlib's names and order; s, descending, is one column. */
final case class SingularValueDecomposition(U: AlMatrix, s: AlMatrix, V: AlMatrix)

object TruncatedSVD {
  def apply(A: AlMatrix, rank: Int): SingularValueDecomposition =
    Linalg.run(A, "truncated_svd", "rank" -> rank) match {
      case Array(s: AlMatrix, u: AlMatrix, v: AlMatrix) => SingularValueDecomposition(u, s, v)
    }
}

/** A = Q R, thin. */
object QRDecomposition {
  def apply(A: AlMatrix): (AlMatrix, AlMatrix) = Linalg.run(A, "qr") match {
    case Array(q: AlMatrix, r: AlMatrix) => (q, r)
  }
}

/** Condition number in the 2-norm, of a matrix of any shape: largest over smallest singular value.
  * (The routine `condest` by itself estimates that in the 1-norm, of square matrices.)
  */
object CondEst {
  def apply(A: AlMatrix): Double = Linalg.run(A, "condest", "ord" -> "2") match {
    case Array(value: Double) => value
  }
}
