package alchemist.spark

import java.io.{Closeable, IOException}
import java.nio.MappedByteBuffer
import java.nio.channels.FileChannel
import java.nio.file.{Files, Path, Paths}
import java.nio.file.StandardOpenOption.{READ, WRITE}
import java.nio.file.attribute.BasicFileAttributes

import scala.collection.mutable

import io.netty.util.internal.PlatformDependent
import org.apache.spark.sql.execution.columnar.Internals
import org.apache.spark.unsafe.Platform

/** One rank's block of a matrix in this process's memory. It is stored by columns.
  *
  * Loops are written out, because they take most of the time of a transfer.
  */
private[spark] final class RankBlock(
    target: Target, held: Target.Held, path: String, nbytes: Long)
    extends Closeable {
  val rank: Int = held.rank

  /** Elements. */
  var written = 0L

  private val rows = held.rows
  private val itemsize = target.element.nbytes
  private val height = rows.count(target.rows)
  private val places = // of the matrix's columns in the block, or -1
    Array.range(0, target.cols).map(col => held.cols.position(col).toInt)
  private var chosen = Array.emptyIntArray // columns of the matrix in rows
  private var columns = chosen // places in the block of those of them that this rank has
  private var columnFrom = chosen // and their first bytes in a row
  private val GROUP = 8
  if (height * held.cols.count(target.cols) * itemsize > nbytes) {
    throw new IOException(s"rank $rank has $nbytes bytes for its block")
  }
  private var segment = Segment.open(path, nbytes) // null: closed

  /** Some rows of the matrix: those that this rank has are found once for all columns. A column
    * begins `offset` bytes before them in an array.
    */
  final class Part(row: Long, count: Int, offset: Int) {
    private val start = rows.count(row)
    private val some = rows.count(row + count) - start
    private val spans = rows.spans(row, row + count).map(_.joined).toArray

    /** Write the elements of this rank of a column, of which each element is given; it begins at
      * `first`.
      */
    def put(col: Long, stored: Array[Byte], first: Int): Unit = {
      val place = places(col.toInt)
      if (some > 0 && place >= 0) put(place, stored, first)
    }

    private def put(place: Int, stored: Array[Byte], first: Int): Unit = {
      if (first < 0 || first + offset.toLong > stored.length - count.toLong * itemsize) {
        throw new IndexOutOfBoundsException(s"$count elements at $first")
      }
      val base = Block.BASE + first + offset
      var to = segment.address((place * height + start) * itemsize, some * itemsize)
      var s = 0
      while (s < spans.length) {
        val runs = spans(s)
        val from = base + (runs.start - row) * itemsize
        if (runs.width == 1) {
          gather(stored, from, runs.period * itemsize, to, runs.runs.toInt)
        } else {
          var k = 0L
          while (k < runs.runs) {
            Platform.copyMemory(
              stored, from + k * runs.period * itemsize,
              null, to + k * runs.width * itemsize, runs.width * itemsize)
            k += 1
          }
        }
        to += runs.size * itemsize
        s += 1
      }
      written += some
    }
  }

  /** A part of a column, which begins `start` rows after the first one in an array. */
  def part(row: Long, start: Int, count: Int): Part = new Part(row + start, count, start * itemsize)

  private def gather(stored: Array[Byte], first: Long, step: Long, place: Long, count: Int): Unit = {
    var from = first
    var to = place
    var k = 0
    if (itemsize == 8) {
      while (k < count) {
        Platform.putLong(null, to, Platform.getLong(stored, from))
        from += step
        to += 8
        k += 1
      }
    }
    while (itemsize == 4 && k < count) {
      Platform.putInt(null, to, Platform.getInt(stored, from))
      from += step
      to += 4
      k += 1
    }
    while (k < count) {
      copy(stored, from, null, to)
      from += step
      to += itemsize
      k += 1
    }
  }

  /** Copy an element. */
  private def copy(source: Array[Byte], from: Long, into: Array[Byte], to: Long): Unit =
    itemsize match {
      case 8 => Platform.putLong(into, to, Platform.getLong(source, from))
      case 4 => Platform.putInt(into, to, Platform.getInt(source, from))
      case 2 => Platform.putShort(into, to, Platform.getShort(source, from))
      case _ => Platform.putByte(into, to, Platform.getByte(source, from))
    }

  /** Write the elements of this rank of rows, in any order, of all columns. */
  def putRows(
      all: Array[Int], stored: Array[Byte], rowBytes: Int, numbers: Array[Long],
      count: Int): Unit = {
    choose(all)
    written += columnFrom.length * copyRows(stored, 0, rowBytes, numbers, count, write = true)
  }

  /** Read the elements of this rank of rows of some columns; the first row begins at `first`. */
  def getRows(
      some: Array[Int], row: Long, count: Int, into: Array[Byte], first: Int,
      rowBytes: Int): Unit = {
    choose(some)
    copyRows(into, first, rowBytes, Array.range(0, count).map(row + _), count, write = false)
  }

  private def choose(some: Array[Int]): Unit = if (!(some eq chosen)) {
    chosen = some
    val here = chosen.indices.filter(k => places(chosen(k)) >= 0).toArray
    columns = here.map(k => places(chosen(k)))
    columnFrom = here.map(_ * itemsize)
  }

  /** Copy the rows with these numbers of which this rank has elements; how many those are. */
  private def copyRows(
      array: Array[Byte], first: Int, rowBytes: Int, numbers: Array[Long], count: Int,
      write: Boolean): Long = {
    val at = new Array[Long](count)
    val place = new Array[Long](count)
    var some = 0
    var k = 0
    while (k < count) {
      place(some) = rows.position(numbers(k)) * itemsize
      at(some) = first + k.toLong * rowBytes
      if (place(some) >= 0) some += 1
      k += 1
    }
    var start = 0
    while (start < some) { // rows that have one address
      var low = place(start)
      var high = low
      var stop = start + 1
      while (stop < some &&
          math.max(high, place(stop)) - math.min(low, place(stop)) + itemsize <= Segment.MOST) {
        low = math.min(low, place(stop))
        high = math.max(high, place(stop))
        stop += 1
      }
      move(array, at, place, start, stop, low, high + itemsize - low, write)
      start = stop
    }
    some
  }

  /** Copy rows of an array to the block, or from it: row k of [start, stop) begins at byte `at(k)` of
    * the array, and at byte `place(k)` of each column, which is one of `length` bytes from `low` on.
    * Columns are copied in groups that fill a cache line of the row.
    */
  private def move(
      array: Array[Byte], at: Array[Long], place: Array[Long], start: Int, stop: Int, low: Long,
      length: Long, write: Boolean): Unit = {
    val width = if (columnFrom.isEmpty) 0 else columnFrom.last + itemsize
    var k = start
    while (k < stop) { // nothing below checks the array's bounds
      if (at(k) < 0 || at(k) + width > array.length) {
        throw new IndexOutOfBoundsException(s"a row at ${at(k)} of ${array.length} bytes")
      }
      k += 1
    }
    val address = new Array[Long](GROUP)
    val offset = new Array[Long](GROUP)
    for (col <- columnFrom.indices by GROUP) {
      val some = math.min(GROUP, columnFrom.length - col)
      for (j <- 0 until some) {
        address(j) = segment.address(columns(col + j) * height * itemsize + low, length) - low
        offset(j) = Block.BASE + columnFrom(col + j)
      }
      k = start
      while (k < stop) {
        val row = at(k)
        val there = place(k)
        var j = 0
        if (itemsize == 8 && write) { // a loop without a choice is quicker
          while (j < some) {
            Platform.putLong(null, address(j) + there, Platform.getLong(array, row + offset(j)))
            j += 1
          }
        } else if (itemsize == 8) {
          while (j < some) {
            Platform.putLong(array, row + offset(j), Platform.getLong(null, address(j) + there))
            j += 1
          }
        } else if (write) {
          while (j < some) {
            copy(array, row + offset(j), null, address(j) + there)
            j += 1
          }
        } else {
          while (j < some) {
            copy(null, address(j) + there, array, row + offset(j))
            j += 1
          }
        }
        k += 1
      }
    }
  }

  override def close(): Unit = if (segment != null) {
    segment.release()
    segment = null
  }
}

/** Memory of a rank, mapped into this process for all its tasks.
  *
  * The mapping is kept for the next transfer, because page faults take longer than to copy the
  * elements. Unused, it is dropped after 10 s: it holds the memory of ranks that are gone.
  */
private[spark] final class Segment private (path: Path, nbytes: Long) {
  import Segment._

  private val mapped = new mutable.ArrayBuffer[MappedByteBuffer]
  private val windows = { // addresses; each window reaches to the end of the next
    val file = FileChannel.open(path, READ, WRITE)
    try {
      if (file.size < nbytes) { // to map more would make the file larger
        throw new IOException(s"$path has ${file.size} of $nbytes bytes")
      }
      for (start <- 0L until nbytes by WINDOW) {
        val length = math.min(2 * WINDOW - WORD, nbytes - start)
        mapped += file.map(FileChannel.MapMode.READ_WRITE, start, length)
      }
    } catch {
      case error: Throwable =>
        mapped.foreach(Internals.dispose)
        throw error
    } finally file.close()
    mapped.map(PlatformDependent.directBufferAddress(_)).toArray
  }
  // Whether each NEAR_FAULT bytes were read, and so are mapped.
  private val read = new Array[Boolean](((nbytes + NEAR_FAULT - 1) / NEAR_FAULT).toInt)
  private var users = 0
  private var released = 0L // the time
  @volatile private var touched: Byte = 0

  def release(): Unit = kept.synchronized {
    users -= 1
    released = System.currentTimeMillis
    if (cleaner == null) {
      cleaner = new Thread(() => clean(), "alchemist-segments")
      cleaner.setDaemon(true)
      cleaner.start()
    }
  }

  /** Drop the mapping if it is idle; whether it was. */
  private def dropped(): Boolean = {
    val idle = users == 0 && System.currentTimeMillis - released >= IDLE_MS
    if (idle) mapped.foreach(Internals.dispose)
    idle
  }

  /** The address of some bytes. The JVM does not check accesses to it. */
  def address(at: Long, length: Long): Long = {
    if (at < 0 || length < 0 || at > nbytes - length || length > MOST) {
      throw new IndexOutOfBoundsException(s"$length bytes at $at of $nbytes")
    }
    val address = windows((at / WINDOW).toInt) + at % WINDOW
    var k = at / NEAR_FAULT
    while (k * NEAR_FAULT < at + length) {
      if (!read(k.toInt)) { // a fault of a write would map one page only
        touched = Platform.getByte(null, address + math.max(0, k * NEAR_FAULT - at))
        read(k.toInt) = true
      }
      k += 1
    }
    address
  }
}

private[spark] object Segment {
  private val IDLE_MS = 10000L // as IDLE_S of node_connections.py
  private val WINDOW = 1L << 30 // Java maps at most 2 GiB at once
  private val WORD = 8
  private val NEAR_FAULT = 64L << 10 // bytes that Linux maps when one is read

  /** The most bytes that have one address. */
  val MOST: Long = WINDOW - WORD

  private val kept = new mutable.HashMap[(Any, Long), Segment] // by file and size
  private var cleaner: Thread = _

  /** Map a file, or use the mapping of another transfer; `release` follows. */
  def open(name: String, nbytes: Long): Segment = {
    val path = Paths.get(name)
    val file = Files.readAttributes(path, classOf[BasicFileAttributes]).fileKey
    kept.synchronized { // the file exists as long as its mapping
      val found = kept.getOrElseUpdate((file, nbytes), new Segment(path, nbytes))
      found.users += 1
      found
    }
  }

  /** Drop mappings that are idle, until there are none. */
  private def clean(): Unit = kept.synchronized {
    while (kept.nonEmpty) {
      kept.wait(IDLE_MS / 4)
      kept.retain((_, one) => !one.dropped())
    }
    cleaner = null
  }
}
