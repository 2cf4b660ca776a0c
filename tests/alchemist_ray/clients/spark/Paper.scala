// The listing of Gittens et al. 2018, III-D, with a wrapper of one's own, and what a program does
// with its results.

import alchemist.{Alchemist, AlMatrix}
import alchemist.AlchemistException
import alchemist.libA.QRDecomposition
import alchemist.linalg.{CondEst, GEMM, SingularValueDecomposition, TruncatedSVD}

import org.apache.spark.mllib.linalg.Vectors
import org.apache.spark.mllib.linalg.distributed.{IndexedRow, IndexedRowMatrix, RowMatrix}
import org.apache.spark.sql.SparkSession

package alchemist.libA {
  object QRDecomposition {
    def apply(A: AlMatrix): (AlMatrix, AlMatrix) = A.context.run("libA", "qr", A) match {
      case Array(q: AlMatrix, r: AlMatrix) => (q, r)
    }
  }
}

object Paper {
  def main(args: Array[String]): Unit = {
    val sc = SparkSession.builder.getOrCreate().sparkContext
    val numWorkers = 3
    val ALILibLocation = args(0)

    val A = new IndexedRowMatrix(sc.parallelize(0 until 40, 4).map { i =>
      IndexedRow(i, Vectors.dense(Array.tabulate(5)(j => math.sin((i + 1) * (j + 1) * 1.3))))
    })

    // --- the listing ---
    val ac = new Alchemist.AlchemistContext(sc, numWorkers)
    ac.registerLibrary("libA", ALILibLocation)

    val alA = AlMatrix(A)
    val Array(condNum) = ac.run("libA", "condest", alA)

    val (alQ, alR) = QRDecomposition(alA)
    val Q = alQ.toIndexedRowMatrix()
    val R = alR.toIndexedRowMatrix()
    // -------------------

    def rows(matrix: IndexedRowMatrix): Array[Array[Double]] =
      matrix.rows.collect().sortBy(_.index).map(_.vector.toArray)

    def close(found: Array[Array[Double]], wanted: Array[Array[Double]]): Boolean =
      found.length == wanted.length && found.zip(wanted).forall { case (f, w) =>
        f.length == w.length && f.zip(w).forall { case (x, y) => math.abs(x - y) < 1e-12 }
      }

    val a = rows(A)
    def check(what: String, holds: Boolean): Unit = println(s"$what: $holds")
    check("Q R = A", close(rows(Q.multiply(R.toBlockMatrix().toLocalMatrix())), a))
    check("GEMM", close(rows(GEMM(alQ, alR).toIndexedRowMatrix()), a))
    check("condest", math.abs(condNum.asInstanceOf[Double] / CondEst(alA) - 1) < 1e-8)
    val SingularValueDecomposition(u, s, v) = TruncatedSVD(alA, 2)
    val sigma = A.computeSVD(2).s.toArray
    check("singular values", close(rows(s.toIndexedRowMatrix()), sigma.map(Array(_))))
    check("shapes", Seq(u, v).map(m => (m.numRows, m.numCols)) == Seq((40, 2), (5, 2)))

    val kinds = Seq(
      AlMatrix(new RowMatrix(A.rows.map(_.vector))), AlMatrix(A.toBlockMatrix(16, 3)),
      AlMatrix(A.toCoordinateMatrix()), AlMatrix(alA.toDataFrame()), AlMatrix(alA.toRowMatrix()),
      AlMatrix(alA.toBlockMatrix()), AlMatrix(alA.toCoordinateMatrix()))
    check("kinds", kinds.forall(matrix => close(rows(matrix.toIndexedRowMatrix()), a)))

    def kindOf(work: => Any): String =
      try { work; "nothing" } catch { case error: AlchemistException => error.kind }
    val errors = Seq(
      kindOf(GEMM(alA, alA)), kindOf(ac.run("linalg", "no_such_routine", alA)),
      kindOf(ac.registerLibrary("no_such_library")))
    check(s"errors $errors", errors ==
      Seq("ShapeError", "NoSuchRoutineError", "LibraryNotFoundError"))
    val product = GEMM(alQ, alR).toIndexedRowMatrix() // its AlMatrix is dropped
    for (_ <- 1 to 3) { System.gc(); Thread.sleep(100); CondEst(alR) }
    check("fetched after a collection", close(rows(product), a))
    alA.free()
    check("freed", kindOf(alA.toRowMatrix()) == "BadArgumentError")
    check("fetched later", close(rows(Q.multiply(R.toBlockMatrix().toLocalMatrix())), a))
    ac.stop()
    check("stopped", kindOf(CondEst(alQ)) == "SessionError")
  }
}
