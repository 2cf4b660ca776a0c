package alchemist.spark

import java.io.Closeable
import java.nio.{ByteBuffer, ByteOrder}

import org.apache.spark.unsafe.Platform

/** Rows that wait to be sent, and the connections to the nodes of their matrix.
  *
  * On the ranks' own node elements are written into the ranks' memory, and to others streamed.
  */
private[spark] final class Block(val target: Target) extends Closeable {
  import Block._

  private val itemsize = target.element.nbytes
  private val rowBytes = target.cols * itemsize
  private val connections = Connection.all(target, target.columns, write = true)
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
    for (node <- near; rank <- node.blocks) rank.putRows(bytes, rowBytes, numbers, count)
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
          target.columns.filter(col => cols.contains(col)))
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
