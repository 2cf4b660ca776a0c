package alchemist.spark

import java.io.{ByteArrayOutputStream, Closeable, IOException, UncheckedIOException}
import java.nio.{ByteBuffer, ByteOrder}
import java.util.{BitSet, Collections, Map => JMap, WeakHashMap}
import java.util.zip.DeflaterOutputStream

import scala.reflect.ClassTag

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.{Partition, TaskContext}
import org.apache.spark.api.java.JavaRDD
import org.apache.spark.mllib.linalg.Matrix
import org.apache.spark.mllib.linalg.distributed.IndexedRow
import org.apache.spark.rdd.{PartitionCoalescer, PartitionGroup, RDD}
import org.apache.spark.sql.{Dataset, Row}
import org.apache.spark.sql.execution.columnar.{DefaultCachedBatch, Internals}
import org.apache.spark.sql.execution.exchange.ShuffleExchangeExec
import org.apache.spark.storage.StorageLevel
import org.apache.spark.unsafe.Platform

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

  /** The rows of a frame: batches of Spark's cache, if it is made of them and has columns of
    * scalars only; else in Spark's internal form, without adaptive execution, which joins partitions
    * from job to job as it likes: rows are counted by partitions in one job, and sent in another.
    */
  def rows(frame: Dataset[Row], scalars: Boolean): OrderedRows =
    (if (scalars) Batches.stored(frame) else None).getOrElse {
      val fixed = Internals.frame(
        frame.queryExecution.analyzed, frame.sparkSession, "spark.sql.adaptive.enabled" -> "false")
      val shuffled = fixed.queryExecution.executedPlan.collectFirst { case s: ShuffleExchangeExec => s }
      // Its columns are not computed to count it, unless they are shuffled: a job of another plan would
      // divide them otherwise (`orderBy` draws its bounds), and the same plan keeps their files.
      val counted = if (shuffled.isEmpty) fixed.select() else fixed
      new OrderedRows(counted.queryExecution.toRdd, fixed.queryExecution.toRdd)
    }

  /** The rows of a RowMatrix. */
  def rows(vectors: JavaRDD[_]): OrderedRows = new OrderedRows(vectors.rdd, vectors.rdd)

  /** The results of one task per core, each with whole partitions: a task has its own connections. */
  private def collect[U: ClassTag](
      source: RDD[_], cores: Int, task: (Int, Iterator[Part]) => Iterator[U]): Seq[U] = {
    val parts = new PartitionTasksRDD[Any, Part](
      source.asInstanceOf[RDD[Any]], (number, some) => Iterator.single(new Part(number, some)))
    val coalesced = parts.coalesce(cores, shuffle = false, ByExecutor.of(parts))
    new PartitionTasksRDD[Part, U](coalesced, task).all
  }

  /** The rows of an element of an RDD: a row, or a batch of them. */
  private def rowsOf(element: Any): Int = element match {
    case batch: DefaultCachedBatch => batch.numRows
    case _ => 1
  }

  /** The rows of each partition by its number, as JSON, for partitions that have any. They are
    * remembered for an RDD that Spark keeps, until `forget`.
    */
  def count(rows: OrderedRows, cores: Int): String = {
    val source = rows.counted
    val kept = source.getStorageLevel != StorageLevel.NONE
    val known = if (kept) counts.get(source) else null
    if (known != null) {
      known
    } else {
      val pairs = collect[(Int, Long)](source, cores, (_, parts) =>
        parts.map(part => part.number -> part.foldLeft(0L)(_ + rowsOf(_))).filter(_._2 > 0))
      val found = Target.JSON.writeValueAsString(pairs)
      if (kept) counts.put(source, found)
      found
    }
  }

  /** The rows are others than when they were counted. */
  def forget(rows: OrderedRows): Unit = counts.remove(rows.counted)

  /** Send rows, or batches of them, ordered by partition: p begins at row `starts(p)`; the tasks'
    * reports, as JSON.
    */
  def ordered(rows: OrderedRows, cores: Int, spec: String): String = {
    val ordinals = rows.ordinals
    reports(rows.sent, cores, spec, sendOrdered(_, _, _, ordinals))
  }

  /** Send IndexedRows, whose numbers must be below 2^31. */
  def numbered(rows: JavaRDD[_], cores: Int, spec: String): String =
    reports(rows.rdd, cores, spec, sendNumbered)

  /** Send zeros as the rows of these numbers (Longs), from this process; its report. */
  def zeros(numbers: Array[Byte], spec: String): String = sent(spec) { (_, block) =>
    val rows = ByteBuffer.wrap(numbers).asLongBuffer
    while (rows.hasRemaining) block.add(rows.get())
    Map.empty
  }

  /** Send the blocks of a BlockMatrix. */
  def blocks(blocks: JavaRDD[_], cores: Int, spec: String): String =
    reports(blocks.rdd, cores, spec, sendBlocks)

  /** Sends the elements of a task, and reports what they were. */
  private type Form = (Iterator[Part], JsonNode, Block) => Map[String, Any]

  private def reports(rows: RDD[_], cores: Int, spec: String, form: Form): String =
    collect[String](rows, cores, (_, parts) => Iterator.single(report(parts, spec, form)))
      .mkString("[", ",", "]") // py4j asks for each item of a list

  private def report(parts: Iterator[Part], spec: String, form: Form): String = {
    val context = TaskContext.get
    val attempt = math.max(context.attemptNumber, context.stageAttemptNumber)
    if (attempt > 0) {
      parts.foreach(_.foreach(_ => ())) // if the source fails again, its error says more
      Target.JSON.writeValueAsString(Map("again" -> attempt))
    } else {
      sent(spec)(form(parts, _, _))
    }
  }

  /** The report of what `send` gives to a block, as JSON. */
  private def sent(spec: String)(send: (JsonNode, Block) => Map[String, Any]): String = {
    val found = try {
      val json = Target.JSON.readTree(spec)
      val block = new Block(new Target(json))
      try {
        val about = send(json, block)
        about + ("times" -> block.finish())
      } finally block.close()
    } catch {
      case failure: Failure => Map("failure" -> failure.fields)
      case error: IOException =>
        val reason = s"a process of Spark could not send its rows: $error"
        Map("failure" -> Failure("TransferError", reason).fields)
    }
    Target.JSON.writeValueAsString(found)
  }

  /** Reports the rows of each partition. */
  private def sendOrdered(
      parts: Iterator[Part], spec: JsonNode, block: Block, ordinals: Seq[Int]): Map[String, Any] = {
    val columns = new Columns(spec.get("columns"), block.target.element, ordinals)
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

  /** Rows and blocks with numbers. Reports a number, and a bit for each from it on: whether it was
    * sent.
    */
  private final class Numbers {
    private val there = new BitSet

    /** Note one by its number, which is below 2^31. */
    def add(number: Long, name: => String): Unit = {
      if (there.get(number.toInt)) {
        throw Failure("IncompleteMatrixError",
          s"$name appears twice: drop duplicates, or add them up")
      }
      there.set(number.toInt)
    }

    def report: Map[String, Any] = {
      val first = math.max(0, there.nextSetBit(0)) & ~7 // whole bytes
      val bits = new ByteArrayOutputStream
      // Compressed, because Spark limits the size of a job's results.
      val stream = new DeflaterOutputStream(bits)
      stream.write(there.get(first, math.max(first, there.length)).toByteArray)
      stream.close()
      Map("first" -> first, "bits" -> bits.toByteArray)
    }
  }

  private def sendNumbered(
      parts: Iterator[Part], spec: JsonNode, block: Block): Map[String, Any] = {
    val target = block.target
    val columns = new Columns(spec.get("columns"), target.element, Nil)
    val numbers = new Numbers
    for (part <- parts; one <- part) {
      val its = one.asInstanceOf[IndexedRow]
      val row = its.index
      if (row < 0 || row >= target.rows) {
        throw Failure("ShapeError",
          s"row $row is outside of a ${target.rows} x ${target.cols} matrix")
      }
      numbers.add(row, s"row $row")
      columns.read(its, block.bytes, block.offset)
      block.add(row)
    }
    numbers.report
  }

  /** Blocks are numbered by rows of blocks. */
  private def sendBlocks(parts: Iterator[Part], spec: JsonNode, block: Block): Map[String, Any] = {
    val target = block.target
    val down = spec.get("block").get(0).asLong
    val across = spec.get("block").get(1).asLong
    val wide = (target.cols + across - 1) / across
    val numbers = new Numbers
    for (part <- parts; one <- part) {
      val ((i, j), matrix) = one.asInstanceOf[((Int, Int), Matrix)]
      val name = s"block ($i, $j)"
      val height = math.min(down, target.rows - i * down)
      val width = math.min(across, target.cols - j * across)
      if (i < 0 || j < 0 || matrix.numRows != height || matrix.numCols != width) {
        throw Failure("ShapeError", s"$name has shape (${matrix.numRows}, ${matrix.numCols}); in a " +
          s"${target.rows} x ${target.cols} matrix of $down x $across blocks it must have " +
          s"($height, $width)")
      }
      numbers.add(i * wide + j, name)
      val values = matrix.toArray // by columns
      val stored = new Array[Byte](Math.multiplyExact(values.length, target.element.nbytes))
      target.element.store(stored, 0, values, name)
      block.put(
        Region(i * down, i * down + height, j * across, j * across + width), stored)
    }
    numbers.report
  }
}

/** Rows without numbers, as an RDD to count and, with the same partitions, one to send.
  *
  * @param ordinals of batches, the place of each column of the matrix
  */
final class OrderedRows private[spark] (
    count: => RDD[_], send: => RDD[_], private[spark] val ordinals: Seq[Int] = Nil) {
  private[spark] lazy val counted = count // Spark plans a frame when it is asked for its RDD
  private[spark] lazy val sent = send
}

/** Rows that wait to be sent, and the connections to the nodes of their matrix.
  *
  * On the ranks' own node elements are written into the ranks' memory, and to others streamed.
  */
private[spark] final class Block(val target: Target) extends Closeable {
  import Block._

  private val itemsize = target.element.nbytes
  private val rowBytes = target.cols * itemsize
  private val columns = target.columns
  private val connections = Connection.all(target, write = true)
  private val (near, others) = connections.partition(_.near)

  /** How many rows fit. */
  val capacity: Int = {
    val least = if (far) 1 else NEAR_ROWS
    val rows = (if (far) BLOCK_BYTES else NEAR_BYTES) / math.max(1, rowBytes)
    math.max(1, math.min(BLOCK_BYTES / math.max(1, rowBytes), math.max(least, rows)))
  }
  val bytes = new Array[Byte](capacity * rowBytes)
  private val numbers = new Array[Long](capacity) // of the rows
  private var count = 0

  /** Whether any element goes to another node. */
  def far: Boolean = others.nonEmpty

  /** Where the next row goes; `add` follows. */
  def offset: Int = count * rowBytes

  /** The row at `offset` is complete. */
  def add(number: Long): Unit = {
    numbers(count) = number
    count += 1
    if (count == capacity) flush()
  }

  /** Send the rows that wait. */
  private def flush(): Unit = {
    val began = System.nanoTime
    for (node <- near; rank <- node.blocks) rank.putRows(columns, bytes, rowBytes, numbers, count)
    took(began)
    if (far && count > 0) stream()
    count = 0
  }

  private def stream(): Unit = {
    val breaks = (1 until count).filter(k => numbers(k) != numbers(k - 1) + 1)
    if (breaks.size.toLong * MIN_RUN < count) {
      for ((first, stop) <- (0 +: breaks).zip(breaks :+ count)) {
        val region = Region(numbers(first), numbers(stop - 1) + 1, 0, target.cols)
        stream(region, byRow = true, bytes, first * rowBytes)
      }
    } else {
      putRows()
    }
  }

  /** Rows of columns on this node: tiles that are read once for all ranks. */
  def parts(row: Long, count: Int): Array[RankBlock#Part] =
    (for {
      node <- near
      most = math.max(NEAR_RUN * node.blocks.size, TILE_BYTES / itemsize)
      start <- 0 until count by most
      rank <- node.blocks
    } yield rank.part(row, start, math.min(most, count - start))).toArray

  /** Elements were written to this node since a time. */
  def took(began: Long): Unit = near.foreach(_.sentNanos += System.nanoTime - began)

  /** Send a region that is stored by columns, without gaps. */
  def put(region: Region, stored: Array[Byte]): Unit = {
    val began = System.nanoTime
    val count = Math.toIntExact(region.row1 - region.row0)
    val tiles = parts(region.row0, count)
    for (k <- 0 until (region.col1 - region.col0).toInt; part <- tiles) {
      part.put(region.col0 + k, stored, k * count * itemsize)
    }
    took(began)
    stream(region, byRow = false, stored, 0)
  }

  /** Send a region to other nodes, from rows or columns without gaps. */
  def stream(region: Region, byRow: Boolean, stored: Array[Byte], first: Int): Unit = {
    val length = if (byRow) region.col1 - region.col0 else region.row1 - region.row0
    for (to <- others) {
      val share = new Share(to.node, region, itemsize, byRow)
      if (share.nbytes > 0) {
        to.beginPut(target.request(to.node, region, byRow), share.nbytes)
        share.send(to, stored, first, length * itemsize)
        to.endPut()
      }
    }
  }

  /** Rows in any order travel in ascending order, with their numbers. */
  private def putRows(): Unit = {
    val order = Array.range(0, count).sortBy(numbers(_))
    val ascending = ByteBuffer.allocate(8 * count).order(ByteOrder.LITTLE_ENDIAN)
    order.foreach(k => ascending.putLong(numbers(k)))
    for (to <- others) {
      val pieces = to.node.products.map { case (rows, cols) =>
        (order.filter(k => rows.contains(numbers(k))),
          columns.filter(col => cols.contains(col)))
      }
      val size = pieces.map { case (rows, cols) => rows.length.toLong * cols.length }.sum
      if (size > 0) {
        to.beginPut(target.request(to.node) + ("rows" -> ascending.array), size * itemsize)
        for ((rows, cols) <- pieces; row <- rows; col <- cols) {
          to.write(bytes, row * rowBytes + col * itemsize, itemsize)
        }
        to.endPut()
      }
    }
  }

  /** Wait until the nodes have stored and counted everything; the times of each node. */
  def finish(): Seq[Map[String, Any]] = {
    flush()
    near.foreach(_.beginUnmap())
    others.foreach(_.beginSync())
    connections.map { connection =>
      val answer = connection.endSync()
      Map(
        "node" -> connection.node.number,
        "route" -> (if (connection.near) "shared memory" else "TCP"),
        "nbytes" -> connection.sentBytes,
        "send_s" -> connection.sentNanos / 1e9,
        "receive_s" -> answer.getOrElse("receive_s", 0.0),
        "deserialize_s" -> answer.getOrElse("place_s", 0.0))
    }
  }

  override def close(): Unit = connections.foreach(_.close())
}

private[spark] object Block {
  val BASE: Long = Platform.BYTE_ARRAY_OFFSET.toLong
  private val BLOCK_BYTES = 8 << 20
  private val NEAR_BYTES = 512 << 10 // without streams: it stays in the cache
  private val NEAR_ROWS = 128 // at least: neighbours in the ranks' memory
  private val TILE_BYTES = 16 << 10 // of a column: read once for all ranks
  private val NEAR_RUN = 128 // elements, at least, of each rank in such a tile
  private val MIN_RUN = 16 // rows: longer runs are sent as regions
}

/** A function of each partition of an RDD. Spark's own `mapPartitions` and `collect` read the class
  * files of their functions again for each job, which takes longer than a small job. PySpark makes
  * its own RDDs only of classes whose names end with RDD.
  */
private[spark] final class PartitionTasksRDD[T: ClassTag, U: ClassTag](
    parent: RDD[T], task: (Int, Iterator[T]) => Iterator[U])
    extends RDD[U](parent) {

  /** All elements, in the order of their partitions. */
  def all: Seq[U] = context.runJob(this, new ToArray[U]).flatten.toSeq.asInstanceOf[Seq[U]]

  override def getPartitions: Array[Partition] = firstParent[T].partitions

  override def compute(split: Partition, context: TaskContext): Iterator[U] =
    task(split.index, firstParent[T].iterator(split, context))
}

private[spark] final class ToArray[E]
    extends ((TaskContext, Iterator[E]) => Array[Any]) with Serializable {
  override def apply(context: TaskContext, elements: Iterator[E]): Array[Any] =
    elements.toArray[Any]
}

/** Groups cached partitions by the executor that has them in its memory.
  *
  * Spark's own coalescer knows hosts only: of two executors on a host, each would fetch about half of
  * its partitions from the other.
  *
  * @param executors of each partition
  */
private[spark] final class ByExecutor private (@transient executors: Array[Option[String]])
    extends PartitionCoalescer with Serializable {
  override def coalesce(most: Int, parent: RDD[_]): Array[PartitionGroup] = {
    val all = parent.partitions
    for {
      (executor, its) <- all.groupBy(partition => executors(partition.index)).toArray
      count = math.max(1, math.round(most.toFloat * its.length / all.length))
      k <- 0 until count
      some = its.slice(k * its.length / count, (k + 1) * its.length / count)
      if some.nonEmpty
    } yield {
      val group = new PartitionGroup(executor)
      group.partitions ++= some
      group
    }
  }
}

private[spark] object ByExecutor {

  /** For an RDD that is cached whole. */
  def of(rdd: RDD[_]): Option[ByExecutor] = {
    val executors = rdd.partitions.map(partition => Internals.executor(rdd, partition.index))
    if (executors.contains(None)) None else Some(new ByExecutor(executors))
  }
}
