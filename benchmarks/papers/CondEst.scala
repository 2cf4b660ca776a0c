// Gittens et al. 2018: ac.run("libA", "condest", alA) and the wrapper CondEst(alA), timed.
// Arguments: runs, then sides of matrices, whose singular values fall from 1 to 1e-6.

import alchemist.{AlchemistContext, AlMatrix}
import alchemist.linalg.CondEst

import org.apache.spark.mllib.linalg.Vectors
import org.apache.spark.mllib.linalg.distributed.{IndexedRow, IndexedRowMatrix}
import org.apache.spark.sql.SparkSession

object CondEstTimes {
  def main(args: Array[String]): Unit = {
    val spark = SparkSession.builder.getOrCreate()
    val (ranks, runs) = (args(0).toInt, args(1).toInt)
    val ac = new AlchemistContext(spark, ranks)
    ac.registerLibrary("linalg")
    for (n <- args.drop(2).map(_.toInt)) {
      // H D H with the reflection H = I - 2 v v^T, v = (1, ..., 1) / sqrt(n).
      val d = Array.tabulate(n)(i => math.pow(10, -6.0 * i / (n - 1)))
      val mean = d.sum / n
      val rows = spark.sparkContext.parallelize(0 until n, 8).map { i =>
        IndexedRow(i, Vectors.dense(Array.tabulate(n) { j =>
          (if (i == j) d(i) else 0.0) - 2.0 / n * (d(i) + d(j)) + 4.0 / n * mean
        }))
      }.cache()
      rows.count()
      for (_ <- 0 to runs) {
        val begun = System.nanoTime()
        val alA = AlMatrix(new IndexedRowMatrix(rows, n, n))
        val sent = System.nanoTime()
        val cond = CondEst(alA)
        val seconds = Seq(sent - begun, System.nanoTime() - sent).map(_ / 1e9)
        alA.free()
        println(s"""{"n": $n, "send_s": ${seconds(0)}, "compute_s": ${seconds(1)}, "cond": $cond}""")
      }
      rows.unpersist()
    }
    ac.stop()
  }
}
