package alchemist.spark

import scala.reflect.ClassTag

import org.apache.spark.TaskContext
import org.apache.spark.api.java.JavaSparkContext
import org.apache.spark.mllib.linalg.{DenseMatrix, DenseVector, Matrix, Vector}
import org.apache.spark.mllib.linalg.distributed._
import org.apache.spark.rdd.RDD

/** A matrix as one of MLlib's: lazy, tasks fetch the elements. The session calls it through py4j. */
object Matrices {

  def rows(spark: JavaSparkContext, spec: String, partitions: Int): RowMatrix = {
    val target = Target.parse(spec)
    new RowMatrix(
      byRow[Vector](spark, spec, partitions, (_, values) => new DenseVector(values)),
      target.rows, target.cols)
  }

  def indexedRows(spark: JavaSparkContext, spec: String, partitions: Int): IndexedRowMatrix = {
    val target = Target.parse(spec)
    new IndexedRowMatrix(
      byRow[IndexedRow](spark, spec, partitions, (row, values) =>
        IndexedRow(row, new DenseVector(values))),
      target.rows, target.cols)
  }

  /** The nonzero elements. */
  def entries(spark: JavaSparkContext, spec: String, partitions: Int): CoordinateMatrix = {
    val target = Target.parse(spec)
    val found = byRow[Iterator[MatrixEntry]](spark, spec, partitions, (row, values) =>
      values.indices.iterator.filter(values(_) != 0).map(j => MatrixEntry(row, j, values(j))))
    val entries = new PartitionTasks[Iterator[MatrixEntry], MatrixEntry](
      found, (_, some) => some.flatMap(identity))
    new CoordinateMatrix(entries, target.rows, target.cols)
  }

  /** Blocks of `down` rows and `across` columns; the last ones are smaller. */
  def blocks(
      spark: JavaSparkContext, spec: String, partitions: Int, down: Int,
      across: Int): BlockMatrix = {
    val target = Target.parse(spec)
    val regions = for {
      row <- 0L until target.rows by down.toLong
      col <- 0L until target.cols.toLong by across.toLong
    } yield Region(
      row, math.min(row + down, target.rows), col, math.min(col + across, target.cols))
    val blocks = fetched[((Int, Int), Matrix)](spark, spec, regions, partitions, (fetcher, region) => {
      val height = (region.row1 - region.row0).toInt
      val width = (region.col1 - region.col0).toInt
      val element = fetcher.target.element
      val stored = new Array[Byte](Math.multiplyExact(height * width, element.nbytes))
      fetcher.columns(region, stored)
      val values = new Array[Double](height * width)
      element.load(stored, 0, values)
      val place = ((region.row0 / down).toInt, (region.col0 / across).toInt)
      Iterator.single((place, new DenseMatrix(height, width, values)))
    })
    new BlockMatrix(blocks, down, across, target.rows, target.cols)
  }

  /** Objects made of each row, which are fetched in batches: at least one in each partition. */
  private def byRow[T: ClassTag](
      spark: JavaSparkContext, spec: String, partitions: Int,
      of: (Long, Array[Double]) => T): RDD[T] = {
    val target = Target.parse(spec)
    val fitting = Fetcher.BATCH_BYTES / (target.cols.toLong * target.element.nbytes)
    val share = (target.rows + partitions - 1) / partitions
    val height = math.max(1, math.min(fitting, share))
    val regions = for (row <- 0L until target.rows by height) yield
      Region(row, math.min(row + height, target.rows), 0, target.cols)
    fetched[T](spark, spec, regions, partitions, (fetcher, region) => {
      val cols = fetcher.target.cols
      val element = fetcher.target.element
      val count = (region.row1 - region.row0).toInt
      val stride = Math.multiplyExact(cols, element.nbytes)
      val stored = new Array[Byte](Math.multiplyExact(count, stride))
      fetcher.rows(region.row0, count, stored, 0, stride)
      Iterator.range(0, count).map { k =>
        val values = new Array[Double](cols)
        element.load(stored, k * stride, values)
        of(region.row0 + k, values)
      }
    })
  }

  /** Objects that tasks make of regions. */
  private def fetched[T: ClassTag](
      spark: JavaSparkContext, spec: String, regions: Seq[Region], partitions: Int,
      of: (Fetcher, Region) => Iterator[T]): RDD[T] =
    new PartitionTasks[Region, T](
      spark.sc.parallelize(regions.toArray[Region], partitions),
      (_, some) => {
        val target = Target.parse(spec)
        val fetcher = new Fetcher(target, target.columns)
        TaskContext.get.addTaskCompletionListener[Unit](_ => fetcher.close())
        some.flatMap(of(fetcher, _))
      })
}
