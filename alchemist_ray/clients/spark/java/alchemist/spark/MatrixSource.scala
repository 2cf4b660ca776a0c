package alchemist.spark

import java.util.{Collections, OptionalLong, Set => JSet}

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
    val rows = stop - start
    val share = rows.toDouble / math.max(1, table.target.rows)
    val wanted = math.max(table.least, math.ceil(table.partitions * share).toLong)
    val count = math.max(1, math.min(rows, wanted)).toInt
    Array.range(0, count).map(k =>
      MatrixRows(start + rows * k / count, start + rows * (k + 1) / count))
  }

  override def createReaderFactory(): PartitionReaderFactory =
    new MatrixReaders(table.spec, readSchema.fieldNames.map(table.schema.fieldIndex))
}

/** Rows [start, stop) of the matrix. */
private[spark] final case class MatrixRows(start: Long, stop: Long) extends InputPartition

/** Makes the readers of partitions, which Spark may read again; `columns` are those that it needs,
  * ascending.
  */
private[spark] final class MatrixReaders(spec: String, columns: Array[Int])
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
  private val fetcher = new Fetcher(target, columns)
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
      fetcher.rows(fetched, count, rows, head, stride)
    } else {
      fetcher.rows(fetched, count, narrow, 0, cols * itemsize)
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
        else Platform.putByte(rows, to, Platform.getByte(narrow, from))
        to += WORD
        from += itemsize
        j += 1
      }
      k += 1
    }
  }

  override def get: InternalRow = row

  override def close(): Unit = fetcher.close()
}
