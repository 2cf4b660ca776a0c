package alchemist.spark

import java.io.{Closeable, IOException}
import java.util.{Collections, OptionalLong, Set => JSet}

import scala.reflect.ClassTag

import org.apache.spark.TaskContext
import org.apache.spark.api.java.JavaSparkContext
import org.apache.spark.mllib.linalg.{DenseMatrix, DenseVector, Matrix, Vector}
import org.apache.spark.mllib.linalg.distributed._
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.{Dataset, Row, SparkSession}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.connector.catalog.{SupportsRead, TableCapability}
import org.apache.spark.sql.connector.read._
import org.apache.spark.sql.execution.columnar.Internals
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation
import org.apache.spark.sql.types.{StructField, StructType}
import org.apache.spark.sql.util.CaseInsensitiveStringMap
import org.apache.spark.unsafe.Platform
import org.roaringbitmap.RoaringBitmap

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

  /** The rows whose numbers `like` has, as MLlib's results; null: these are all rows. */
  def present(matrix: IndexedRowMatrix, like: IndexedRowMatrix): IndexedRowMatrix = {
    val there = like.rows.treeAggregate(new RoaringBitmap)(
      (bits, row) => { bits.add(row.index.toInt); bits }, (a, b) => { a.or(b); a })
    if (there.getLongCardinality == matrix.numRows()) return null
    val known = matrix.rows.sparkContext.broadcast(there)
    val rows = matrix.rows.filter(row => known.value.contains(row.index.toInt))
    new IndexedRowMatrix(rows, matrix.numRows(), matrix.numCols().toInt)
  }

  /** The nonzero elements. */
  def entries(spark: JavaSparkContext, spec: String, partitions: Int): CoordinateMatrix = {
    val target = Target.parse(spec)
    val found = byRow[Iterator[MatrixEntry]](spark, spec, partitions, (row, values) =>
      values.indices.iterator.filter(values(_) != 0).map(j => MatrixEntry(row, j, values(j))))
    val entries = new PartitionTasksRDD[Iterator[MatrixEntry], MatrixEntry](
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
    val blocks = new PartitionTasksRDD[Region, ((Int, Int), Matrix)](
      spark.sc.parallelize(regions.toArray[Region], partitions),
      (_, some) => {
        val target = Target.parse(spec)
        val fetcher = new Fetcher(target)
        TaskContext.get.addTaskCompletionListener[Unit](_ => fetcher.close())
        some.map { region =>
          val height = (region.row1 - region.row0).toInt
          val width = (region.col1 - region.col0).toInt
          val itemsize = target.element.nbytes
          val stored = new Array[Byte](Math.multiplyExact(height * width, itemsize))
          val columns = Array.range(region.col0.toInt, region.col1.toInt)
          fetcher.rows(columns, region.row0, height, stored, 0, width * itemsize)
          val values = new Array[Double](height * width)
          target.element.load(stored, 0, itemsize, values)
          val place = ((region.row0 / down).toInt, (region.col0 / across).toInt)
          (place, new DenseMatrix(height, width, values, isTransposed = true)) // by rows
        }
      })
    new BlockMatrix(blocks, down, across, target.rows, target.cols)
  }

  /** Objects made of each row. */
  private def byRow[T: ClassTag](
      spark: JavaSparkContext, spec: String, partitions: Int,
      of: (Long, Array[Double]) => T): RDD[T] =
    new PartitionTasksRDD[MatrixRows, T](
      spark.sc.parallelize(MatrixRows(0, Target.parse(spec).rows).split(partitions), partitions),
      (_, some) => some.flatMap { part =>
        val target = Target.parse(spec)
        val reader = new RowReader(target, target.columns, part)
        TaskContext.get.addTaskCompletionListener[Unit](_ => reader.close())
        (part.start until part.stop).iterator.map { row =>
          reader.next()
          of(row, reader.doubles)
        }
      })
}

/** Reads rows of a matrix, of all columns or of some; connects at the first ones.
  *
  * On the ranks' own node it reads the ranks' memory; other nodes stream their share.
  */
private[spark] final class Fetcher(target: Target) extends Closeable {
  private val itemsize = target.element.nbytes
  private var opened = false
  private lazy val connections = {
    val all = Connection.all(target, write = false)
    opened = true // not before: close() would connect once more
    all
  }
  private lazy val others = connections.filterNot(_.near)

  /** Rows [start, start + count) of the `chosen` columns, ascending: each begins `stride` bytes after
    * the one before.
    */
  def rows(
      chosen: Array[Int], start: Long, count: Int, into: Array[Byte], first: Int,
      stride: Int): Unit =
    if (chosen.nonEmpty) {
      if (others.nonEmpty) {
        // A run of them is read by one request, with the columns between them.
        val breaks = (1 until chosen.length).filter(k =>
          chosen(k) - chosen(k - 1) - 1 > chosen.length / Fetcher.GAP_SHARE)
        for ((from, to) <- (0 +: breaks).zip(breaks :+ chosen.length)) {
          receive(start, count, chosen.slice(from, to), into, first + from * itemsize, stride)
        }
      }
      for (node <- connections; rank <- node.blocks) {
        rank.getRows(chosen, start, count, into, first, stride)
      }
    }

  /** The share of other nodes of a run of columns; elements of this node are undefined. */
  private def receive(
      start: Long, count: Int, run: Array[Int], into: Array[Byte], first: Int,
      stride: Int): Unit = {
    val region = Region(start, start + count, run.head, run.last + 1)
    val width = run.last + 1 - run.head
    if (width == run.length) {
      receive(region, into, first, stride)
    } else {
      val rowBytes = Math.multiplyExact(width, itemsize)
      val gapped = new Array[Byte](Math.multiplyExact(count, rowBytes))
      receive(region, gapped, 0, rowBytes)
      for (row <- 0 until count; k <- run.indices) {
        System.arraycopy(
          gapped, row * rowBytes + (run(k) - run.head) * itemsize,
          into, first + row * stride + k * itemsize, itemsize)
      }
    }
  }

  /** The share of other nodes of a region, by rows. */
  private def receive(region: Region, into: Array[Byte], first: Int, stride: Int): Unit =
    for (from <- others) {
      val share = new Share(from.node, region, itemsize, byRow = true)
      if (share.nbytes > 0) {
        from.get(target.request(from.node, region, byRow = true), share.nbytes)
        share.receive(from, into, first, stride)
      }
    }

  override def close(): Unit = if (opened) connections.foreach(_.close())
}

private[spark] object Fetcher {
  val BATCH_BYTES: Int = 1 << 20 // of elements, fetched at once
  private val GAP_SHARE = 4 // a request costs about as much as a quarter of a batch
}

/** A matrix as a DataFrame; the session calls it through py4j. */
object MatrixSource {

  /** The columns have the names, a list in JSON; if it is empty, c0, c1, ...
    *
    * Spark finds a source by its name in all its jars; a table needs no search.
    */
  def frame(spark: SparkSession, spec: String, partitions: Int, names: String): Dataset[Row] = {
    val table = new MatrixTable(spec, partitions, spark.sparkContext.defaultParallelism)
    val frame = Internals.frame(DataSourceV2Relation.create(table, None, None), spark)
    val all = Target.JSON.readValue(names, classOf[Array[String]])
    if (all.nonEmpty) frame.toDF(all: _*) else frame
  }
}

/** A scan of some of its rows has fewer partitions, but at least `least`. */
private[spark] final class MatrixTable(val spec: String, val partitions: Int, cores: Int)
    extends SupportsRead {
  val target: Target = Target.parse(spec)
  val least: Int = math.min(cores, partitions)

  override val schema: StructType = StructType(Array.range(0, target.cols).map(j =>
    StructField(s"c$j", target.element.sparkType, nullable = false)))

  override def name: String = "matrix of an Alchemist gang"

  override def capabilities: JSet[TableCapability] =
    Collections.singleton(TableCapability.BATCH_READ)

  override def newScanBuilder(more: CaseInsensitiveStringMap): ScanBuilder =
    MatrixPart(this, schema, 0, target.rows)
}

/** The rows and columns that a query needs. Spark reads equal parts once for a query. */
private[spark] final case class MatrixPart(
    table: MatrixTable, var readSchema: StructType, var start: Long, var stop: Long)
    extends ScanBuilder with SupportsPushDownRequiredColumns with SupportsPushDownLimit
    with SupportsPushDownOffset with Scan with SupportsReportStatistics with Batch {

  override def pruneColumns(needed: StructType): Unit = readSchema = needed

  override def pushLimit(limit: Int): Boolean = {
    stop = math.min(stop, start + limit)
    true
  }

  override def isPartiallyPushed: Boolean = false // Spark does not limit the rows again

  override def pushOffset(offset: Int): Boolean = {
    start = math.min(stop, start + offset)
    true
  }

  override def build(): Scan = this

  override def toBatch: Batch = this

  override def description: String = s"${table.name}, rows $start to $stop"

  /** Of rows in Spark's form: it sends a small side of a join to all executors. */
  override def estimateStatistics(): Statistics = new Statistics {
    override def sizeInBytes: OptionalLong =
      OptionalLong.of((stop - start) * UnsafeRow.WORD_SIZE * (1 + readSchema.size))
    override def numRows: OptionalLong = OptionalLong.of(stop - start)
  }

  /** The same of any columns: rows are counted by partitions without columns, then sent. */
  override def planInputPartitions(): Array[InputPartition] = {
    check()
    val rows = stop - start
    val share = rows.toDouble / math.max(1, table.target.rows)
    val wanted = math.max(table.least, math.ceil(table.partitions * share).toLong)
    MatrixRows(start, stop).split(math.max(1, math.min(rows, wanted)).toInt).toArray
  }

  /** Read an element. A matrix that is not there any more is one line here; of each task that failed
    * Spark would show the stack.
    */
  private def check(): Unit =
    if (readSchema.nonEmpty && start < stop) {
      val fetcher = new Fetcher(table.target)
      val column = table.schema.fieldIndex(readSchema.fieldNames.head)
      val nbytes = table.target.element.nbytes
      try fetcher.rows(Array(column), start, 1, new Array[Byte](nbytes), 0, nbytes)
      catch {
        case error: IOException =>
          throw new IllegalArgumentException(
            s"the matrix of this frame cannot be read: ${error.getMessage}. Was it freed, or has its " +
            "gang ended? Call .cache() on frames that must outlive the matrix")
      } finally fetcher.close()
    }

  override def createReaderFactory(): PartitionReaderFactory =
    new MatrixReaders(table, table.spec, readSchema.fieldNames.map(table.schema.fieldIndex))
}

/** Rows [start, stop) of the matrix. */
private[spark] final case class MatrixRows(start: Long, stop: Long) extends InputPartition {

  /** As many parts of about the same size. */
  def split(count: Int): Seq[MatrixRows] = {
    val rows = stop - start
    Seq.tabulate(count)(k => MatrixRows(start + rows * k / count, start + rows * (k + 1) / count))
  }
}

/** Makes the readers of partitions, which Spark may read again; `columns` are those that it needs,
  * ascending. In the driver an RDD of a frame refers to the table by them; see `Dropped`.
  */
private[spark] final class MatrixReaders(
    @transient val table: MatrixTable, spec: String, columns: Array[Int])
    extends PartitionReaderFactory {
  override def createReader(partition: InputPartition): PartitionReader[InternalRow] =
    new RowReader(Target.parse(spec), columns, partition.asInstanceOf[MatrixRows])
}

/** Rows in Spark's binary form: a word per 64 columns for nulls, then 8 bytes per element.
  *
  * Elements of 8 bytes are fetched to where they belong. In columns, Spark would make the same rows of
  * them, element by element.
  */
private[spark] final class RowReader(target: Target, columns: Array[Int], part: MatrixRows)
    extends PartitionReader[InternalRow] {
  private val WORD = UnsafeRow.WORD_SIZE

  private val cols = columns.length
  private val itemsize = target.element.nbytes
  private val fetcher = new Fetcher(target)
  private var fetched = part.start // rows before this one were fetched
  private val head = UnsafeRow.calculateBitSetWidthInBytes(cols) // bytes of a row's nulls
  private val stride = Math.addExact(head, Math.multiplyExact(WORD, cols)) // and of all
  private val height = { // rows that fit
    val fitting = Fetcher.BATCH_BYTES / math.max(WORD, stride)
    math.min(math.max(1, fitting), part.stop - part.start).toInt
  }
  private val rows = new Array[Byte](Math.multiplyExact(height, stride))
  private val narrow = // elements of less than a word
    if (itemsize == WORD) null else new Array[Byte](height * cols * itemsize)
  private var count = 0 // rows in `rows`
  private var at = 0 // the current one
  private val row = new UnsafeRow(cols)

  override def next(): Boolean = {
    at += 1
    if (at >= count && fetched < part.stop) fetch()
    if (at < count) row.pointTo(rows, Block.BASE + at.toLong * stride, stride)
    at < count
  }

  private def fetch(): Unit = {
    at = 0
    count = math.min(height, part.stop - fetched).toInt
    if (narrow == null) {
      fetcher.rows(columns, fetched, count, rows, head, stride)
    } else {
      fetcher.rows(columns, fetched, count, narrow, 0, cols * itemsize)
      widen()
    }
    fetched += count
  }

  private def widen(): Unit = {
    var from = Block.BASE
    var k = 0
    while (k < count) {
      var to = Block.BASE + k.toLong * stride + head
      var j = 0
      while (j < cols) {
        if (itemsize == 4) Platform.putInt(rows, to, Platform.getInt(narrow, from))
        else if (itemsize == 2) Platform.putShort(rows, to, Platform.getShort(narrow, from))
        else Platform.putByte(rows, to, Platform.getByte(narrow, from))
        to += WORD
        from += itemsize
        j += 1
      }
      k += 1
    }
  }

  override def get: InternalRow = row

  /** The elements of the current row. */
  def doubles: Array[Double] = {
    val values = new Array[Double](cols)
    target.element.load(rows, at * stride + head, WORD, values)
    values
  }

  override def close(): Unit = fetcher.close()
}
