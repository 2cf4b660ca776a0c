package alchemist.spark

import java.io.{ByteArrayOutputStream, IOException, UncheckedIOException}
import java.util.{Collections, Map => JMap, WeakHashMap}
import java.util.zip.DeflaterOutputStream

import scala.collection.mutable
import scala.reflect.ClassTag

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.TaskContext
import org.apache.spark.api.java.JavaRDD
import org.apache.spark.mllib.linalg.Matrix
import org.apache.spark.mllib.linalg.distributed.IndexedRow
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.{Dataset, Row}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.columnar.CachedBatch
import org.apache.spark.sql.execution.columnar.{DefaultCachedBatch, Internals}
import org.apache.spark.sql.vectorized.ColumnarBatch
import org.apache.spark.storage.StorageLevel

/** Counts rows, and sends rows and blocks to the ranks from executors. The session calls it through
  * py4j.
  *
  * A task returns its report, or its failure, as JSON: if it failed, Spark would repeat it, and rows
  * would be written twice. Errors of the data's own computation fail the task as usual.
  */
object Sender {
  private val counts: JMap[RDD[_], String] =
    Collections.synchronizedMap(new WeakHashMap[RDD[_], String])

  /** Rows, or batches of them, of one partition. An error of their source must not be taken for one of
    * sending.
    */
  private final class Part(val number: Int, source: Iterator[Any]) extends Iterator[Any] {
    override def hasNext: Boolean =
      try source.hasNext
      catch { case error: IOException => throw unread(error) }

    override def next(): Any =
      try source.next()
      catch { case error: IOException => throw unread(error) }

    private def unread(error: IOException): Throwable = new UncheckedIOException(
      "Spark could not read the rows: their source, for example a Python worker, has ended", error)
  }

  /** The frame without adaptive execution, which joins partitions from job to job as it likes: rows
    * are counted by partitions in one job, and sent in another.
    */
  def fixed(frame: Dataset[Row]): Dataset[Row] = Internals.frame(
    frame.queryExecution.analyzed, frame.sparkSession, "spark.sql.adaptive.enabled" -> "false")

  /** The rows of a DataFrame in Spark's internal form. */
  def rows(frame: Dataset[Row]): JavaRDD[InternalRow] = frame.queryExecution.toRdd.toJavaRDD()

  /** Batches of Spark's cache, or null: `Batches.stored`. */
  def stored(frame: Dataset[Row]): Batches = Batches.stored(frame)

  /** Batches, or null: `Batches.of`. */
  def batches(fixed: Dataset[Row]): Batches = Batches.of(fixed)

  /** The results of one task per core, each with whole partitions: a task has its own connections. */
  private def collect[U: ClassTag](
      source: RDD[_], cores: Int, task: (Int, Iterator[Part]) => Iterator[U]): Seq[U] = {
    val parts = new PartitionTasks[Any, Part](
      source.asInstanceOf[RDD[Any]], (number, some) => Iterator.single(new Part(number, some)))
    val coalesced = parts.coalesce(cores, shuffle = false, ByExecutor.of(parts))
    new PartitionTasks[Part, U](coalesced, task).all
  }

  /** The rows of an element of an RDD: a row, or a batch of them. */
  private def rowsOf(element: Any): Int = element match {
    case batch: CachedBatch => batch.numRows
    case batch: ColumnarBatch => batch.numRows
    case _ => 1
  }

  /** The rows of each partition by its number, as JSON, for partitions that have any. They are
    * remembered for an RDD that Spark keeps: `forget`.
    */
  def count(rows: JavaRDD[_], cores: Int): String = {
    val kept = rows.getStorageLevel != StorageLevel.NONE
    val known = if (kept) counts.get(rows.rdd) else null
    if (known != null) {
      known
    } else {
      val pairs = collect[(Int, Long)](rows.rdd, cores, (_, parts) =>
        parts.map(part => part.number -> part.foldLeft(0L)(_ + rowsOf(_))).filter(_._2 > 0))
      val found = Target.JSON.writeValueAsString(pairs)
      if (kept) counts.put(rows.rdd, found)
      found
    }
  }

  /** The same of a frame, whose columns are not computed for it. */
  def count(fixed: Dataset[Row], cores: Int): String = count(rows(fixed.select()), cores)

  /** The rows are others than when they were counted. */
  def forget(rows: JavaRDD[_]): Unit = counts.remove(rows.rdd)

  /** Send rows, or batches of them, ordered by partition: p begins at row `starts(p)`; the tasks'
    * reports, as JSON.
    */
  def ordered(rows: JavaRDD[_], cores: Int, spec: String): String =
    reports(rows, cores, spec, sendOrdered)

  /** Send IndexedRows, whose numbers must be below 2^31. */
  def numbered(rows: JavaRDD[_], cores: Int, spec: String): String =
    reports(rows, cores, spec, sendNumbered)

  /** Send the blocks of a BlockMatrix. */
  def blocks(blocks: JavaRDD[_], cores: Int, spec: String): String =
    reports(blocks, cores, spec, sendBlocks)

  /** Sends the elements of a task, and reports what they were. */
  private type Form = (Iterator[Part], JsonNode, Block) => Map[String, Any]

  private def reports(rows: JavaRDD[_], cores: Int, spec: String, form: Form): String =
    collect[String](rows.rdd, cores, (_, parts) => Iterator.single(report(parts, spec, form)))
      .mkString("[", ",", "]") // py4j asks for each item of a list

  private def report(parts: Iterator[Part], spec: String, form: Form): String = {
    val context = TaskContext.get
    val attempt = math.max(context.attemptNumber, context.stageAttemptNumber)
    val found: Map[String, Any] = if (attempt > 0) {
      parts.foreach(_.foreach(_ => ())) // if the source fails again, its error says more
      Map("again" -> attempt)
    } else {
      try {
        val json = Target.JSON.readTree(spec)
        val block = new Block(new Target(json))
        try {
          val sent = form(parts, json, block)
          sent + ("times" -> block.finish())
        } finally block.close()
      } catch {
        case failure: Failure => Map("failure" -> failure.fields)
        case error: IOException =>
          val reason = s"a Spark executor could not send its rows: $error"
          Map("failure" -> Failure("TransferError", reason).fields)
      }
    }
    Target.JSON.writeValueAsString(found)
  }

  /** Reports the rows of each partition. */
  private def sendOrdered(
      parts: Iterator[Part], spec: JsonNode, block: Block): Map[String, Any] = {
    val columns = new Columns(spec.get("columns"), block.target.element)
    val starts = spec.get("starts")
    val seen = parts.map { part =>
      val first = starts.path(part.number).asLong
      val stop = starts.path(part.number + 1).asLong // 0: it had no rows
      var row = first
      while (part.hasNext) {
        val its = part.next()
        val count = rowsOf(its)
        if (row + count > stop) {
          throw Failure("TransferError", s"partition ${part.number} has more rows than when it was " +
            "counted, so its rows change between jobs: df.cache() or df.checkpoint() it first")
        }
        its match {
          case batch: DefaultCachedBatch => columns.send(batch, row, block)
          case batch: ColumnarBatch => columns.send(batch, row, block)
          case one =>
            columns.read(one, block.bytes, block.offset)
            block.add(row)
        }
        row += count
      }
      part.number.toString -> (row - first)
    }
    Map("seen" -> seen.filter(_._2 > 0).toMap, "direct" -> columns.direct) // in this order
  }

  /** Reports a number, and a bit for each row from it on: whether it was sent. */
  private def sendNumbered(
      parts: Iterator[Part], spec: JsonNode, block: Block): Map[String, Any] = {
    val target = block.target
    val columns = new Columns(spec.get("columns"), target.element)
    val places = new java.util.BitSet
    for (part <- parts; one <- part) {
      val its = one.asInstanceOf[IndexedRow]
      val row = its.index
      if (row < 0 || row >= target.rows) {
        throw Failure("ShapeError",
          s"row $row is outside of a ${target.rows} x ${target.cols} matrix")
      }
      if (places.get(Math.toIntExact(row))) throw duplicate(s"row $row")
      places.set(row.toInt)
      columns.read(its, block.bytes, block.offset)
      block.add(row)
    }
    val first = math.max(0, places.nextSetBit(0)) & ~7 // whole bytes
    val bits = new ByteArrayOutputStream
    // Compressed, because Spark limits the size of a job's results.
    val stream = new DeflaterOutputStream(bits)
    stream.write(places.get(first, math.max(first, places.length)).toByteArray)
    stream.close()
    Map("first" -> first, "bits" -> bits.toByteArray)
  }

  /** Reports the rows and columns of the blocks in the matrix of blocks. */
  private def sendBlocks(parts: Iterator[Part], spec: JsonNode, block: Block): Map[String, Any] = {
    val target = block.target
    val down = spec.get("block").get(0).asLong
    val across = spec.get("block").get(1).asLong
    val places = new mutable.LinkedHashSet[Seq[Int]]
    for (part <- parts; one <- part) {
      val ((i, j), matrix) = one.asInstanceOf[((Int, Int), Matrix)]
      val name = s"block ($i, $j)"
      if (!places.add(Seq(i, j))) throw duplicate(name)
      val height = math.min(down, target.rows - i * down)
      val width = math.min(across, target.cols - j * across)
      if (matrix.numRows != height || matrix.numCols != width) {
        throw Failure("ShapeError", s"$name has shape (${matrix.numRows}, ${matrix.numCols}); in a " +
          s"${target.rows} x ${target.cols} matrix of $down x $across blocks it must have " +
          s"($height, $width)")
      }
      val values = matrix.toArray // by columns
      val stored = new Array[Byte](Math.multiplyExact(values.length, target.element.nbytes))
      target.element.store(stored, 0, values, name)
      block.put(
        Region(i * down, i * down + height, j * across, j * across + width), stored)
    }
    Map("blocks" -> places.toSeq)
  }

  private def duplicate(what: String): Failure =
    Failure("IncompleteMatrixError", s"$what appears twice: drop duplicates, or add them up")
}
