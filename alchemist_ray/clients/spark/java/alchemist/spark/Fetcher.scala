package alchemist.spark

import java.io.Closeable

/** Reads rows, of all columns or of some, and regions of a matrix; connects at the first one.
  *
  * On the ranks' own node it reads the ranks' memory; other nodes stream their share.
  *
  * @param chosen columns of the rows, ascending
  */
private[spark] final class Fetcher(val target: Target, chosen: Array[Int]) extends Closeable {
  private val itemsize = target.element.nbytes
  private var opened = false
  private lazy val connections = {
    opened = true
    Connection.all(target, chosen, write = false)
  }
  private lazy val others = connections.filterNot(_.near)

  /** Of `chosen`, [from, to): read by one request, with the columns between them. */
  private val runs = {
    val breaks = (1 until chosen.length).filter(k =>
      chosen(k) - chosen(k - 1) - 1 > chosen.length / Fetcher.GAP_SHARE)
    (0 +: breaks).zip(breaks :+ chosen.length)
  }

  /** Rows [start, start + count): each begins `stride` bytes after the one before. */
  def rows(start: Long, count: Int, into: Array[Byte], first: Int, stride: Int): Unit =
    if (chosen.nonEmpty) {
      if (others.nonEmpty) {
        for ((from, to) <- runs) {
          receive(start, count, from, to, into, first + from * itemsize, stride)
        }
      }
      for (node <- connections; rank <- node.blocks) {
        rank.getRows(start, count, into, first, stride)
      }
    }

  /** The share of other nodes of a run of columns; elements of this node are undefined. */
  private def receive(
      start: Long, count: Int, from: Int, to: Int, into: Array[Byte], first: Int,
      stride: Int): Unit = {
    val left = chosen(from)
    val right = chosen(to - 1) + 1
    val region = Region(start, start + count, left, right)
    if (right - left == to - from) {
      receive(region, byRow = true, into, first, stride)
    } else {
      val rowBytes = Math.multiplyExact(right - left, itemsize)
      val gapped = new Array[Byte](Math.multiplyExact(count, rowBytes))
      receive(region, byRow = true, gapped, 0, rowBytes)
      for (row <- 0 until count; k <- from until to) {
        System.arraycopy(
          gapped, row * rowBytes + (chosen(k) - left) * itemsize,
          into, first + row * stride + (k - from) * itemsize, itemsize)
      }
    }
  }

  /** A region by columns, without gaps. */
  def columns(region: Region, into: Array[Byte]): Unit = {
    val count = Math.toIntExact(region.row1 - region.row0)
    val stride = count * itemsize
    receive(region, byRow = false, into, 0, stride)
    for (node <- connections; rank <- node.blocks) {
      val part = rank.part(region.row0, 0, count)
      for (col <- region.col0 until region.col1) {
        part.get(col, into, (col - region.col0).toInt * stride)
      }
    }
  }

  /** The share of other nodes of a region. */
  private def receive(
      region: Region, byRow: Boolean, into: Array[Byte], first: Int, stride: Int): Unit =
    for (from <- others) {
      val share = new Share(from.node, region, itemsize, byRow)
      if (share.nbytes > 0) {
        from.get(target.request(from.node, region, byRow), share.nbytes)
        share.receive(from, into, first, stride)
      }
    }

  override def close(): Unit = if (opened) connections.foreach(_.close())
}

private[spark] object Fetcher {
  val BATCH_BYTES: Int = 1 << 20 // of elements, fetched at once
  private val GAP_SHARE = 4 // a request costs about as much as a quarter of a batch
}
